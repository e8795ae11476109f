"""Names, order and defaults of the API are normative: a kernel must drop in."""

from __future__ import annotations

import dataclasses
import inspect
import pickle

import pytest
import torch

from moetail import spec
from moetail.spec import operations
from moetail.spec.api import WorkspaceFactory

TAIL = "x, residual, post_weight, post_eps, next_weight, next_eps, scales"
SIGNATURES = {
    "convert_flashinfer_moe_output": (
        "flashinfer_output, *, do_finalize, num_tokens, top_k, finalized_output=None"
    ),
    "route_major_moe_output": "routes, topk_weights, topk_ids, expert_map",
    "beam_moe_finalize": (
        "expert_outputs, expert_weights, output, routed_scale=1.0, post_weight=None, post_eps=None"
    ),
    "beam_norm_residual_norm": TAIL,
    "beam_moe_finalize_norm_residual_norm": f"{TAIL}, routed_scale=1.0, *, strategy=None",
    "beam_moe_finalize_gather_norm_residual_norm": (
        f"{TAIL}, workspace, routed_scale=1.0, *, strategy=None"
    ),
    "finalize_moe_output": "x",
    "beam_finalize_allreduce_norm_residual_norm": f"{TAIL}, workspace",
}


def spelled(function) -> str:
    parameters = [
        parameter.replace(annotation=parameter.empty)
        for name, parameter in inspect.signature(function).parameters.items()
        if name != "self"
    ]
    return str(inspect.Signature(parameters))[1:-1]


@pytest.mark.parametrize("operation", SIGNATURES)
def test_signature(operation):
    assert spelled(getattr(spec.MoETail, operation)) == SIGNATURES[operation]


def test_workspace():
    assert spelled(WorkspaceFactory.create) == "group, hidden_size, max_tokens, dtype"
    assert list(spec.Workspace.__annotations__) == [
        "world_size",
        "rank",
        "hidden_size",
        "max_tokens",
        "device_group",
        "all_gather",
        "moe_gather_oneshot_max_tokens",
        "moe_gather_separate_norm_min_tokens",
    ]


def test_types():
    def defaults(cls) -> list[tuple]:
        return [(field.name, field.default) for field in dataclasses.fields(cls)]

    missing = dataclasses.MISSING
    assert defaults(spec.UnfinalizedMoEOutput) == [
        ("gemm2_permuted", missing),
        ("expert_weights", missing),
        ("expanded_idx_to_permuted_idx", missing),
        ("route_major", False),
    ]
    assert defaults(spec.MoEOutput) == [
        ("routed", missing),
        ("shared_output", None),
        ("routed_scaling_factor", 1.0),
    ]


def test_error_says_everything_and_survives_a_process_boundary():
    error = spec.ContractError("DOMAIN-1", "output", "rank 3", "rank 2")
    assert isinstance(error, ValueError)
    assert str(error) == "[DOMAIN-1] output: found rank 3; allowed: rank 2"
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is spec.ContractError
    assert vars(copy) == vars(error)
    assert str(copy) == str(error)


def test_checks_read_no_values():
    """Meta tensors have none, so that a check which passes them reads none."""
    checks = spec.checks
    bf16 = {"dtype": torch.bfloat16, "device": "meta"}
    rows, weights = torch.empty(5, 2, 256, **bf16), torch.empty(5, 2, device="meta")
    residual, affine = torch.empty(3, 256, **bf16), torch.empty(256, **bf16)
    index = torch.empty(5, 2, dtype=torch.int32, device="meta")
    x = spec.UnfinalizedMoEOutput(rows.view(10, 256), weights, index)
    norms = dict.fromkeys(("post_weight", "next_weight"), affine)
    tail = {"residual": residual, **norms, "post_eps": 1e-6, "next_eps": 1e-6, "scales": (1.0, 2.0)}
    slots = {"expert_outputs": rows, "expert_weights": weights, "output": residual.clone()}
    checks.check(operations.FINALIZE, {**slots, "routed_scale": 1.0})
    checks.check(operations.BOUNDARY, {"x": residual, **tail})
    checks.check(operations.FUSED, {"x": x, **tail, "routed_scale": 1.0, "strategy": None})
    routed = spec.UnfinalizedMoEOutput(rows.view(10, 256), weights[:3], index[:3])
    checks.check(operations.MOE_OUTPUT, {"x": spec.MoEOutput(routed, residual)})
