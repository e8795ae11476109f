"""DOMAIN-1, DOMAIN-2 and PACK-1: what each operation refuses, by name, before anything changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from moetail import reference
from moetail.spec import ContractError, MoEOutput

FINALIZE = "beam_moe_finalize"
BOUNDARY = "beam_norm_residual_norm"
FUSED = "beam_moe_finalize_norm_residual_norm"
GATHER = "beam_moe_finalize_gather_norm_residual_norm"
MOE_OUTPUT = "finalize_moe_output"
ALLREDUCE = "beam_finalize_allreduce_norm_residual_norm"
OPERATIONS = (FINALIZE, BOUNDARY, FUSED, GATHER, MOE_OUTPUT, ALLREDUCE)
BF16, NAN = torch.bfloat16, float("nan")

Spoil = Callable[[Any], None]


def leaf(call: Any, path: str) -> tuple[Any, str]:
    *parents, name = path.split(".")
    for parent in parents:
        call = getattr(call, parent)
    return call, name


def put(path: str, value: Any) -> Spoil:
    """Replace the argument at ``path`` by ``value``, or by its result on the legal argument."""

    def spoil(call: Any) -> None:
        owner, name = leaf(call, path)
        setattr(owner, name, value(getattr(owner, name)) if callable(value) else value)

    return spoil


def both(*spoils: Spoil) -> Spoil:
    def spoil(call: Any) -> None:
        for each in spoils:
            each(call)

    return spoil


def strided(tensor: Tensor) -> Tensor:
    """The same values, each last dimension padded by 8 elements that belong to nobody."""
    padded = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 8), 9, dtype=tensor.dtype)
    padded[..., : tensor.shape[-1]] = tensor
    return padded[..., : tensor.shape[-1]]


def every_other(tensor: Tensor) -> Tensor:
    """The same values in every other row."""
    return tensor.repeat_interleave(2, dim=0)[::2]


def meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def resized(*shape: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: torch.ones(shape, dtype=tensor.dtype)


def beam_rows(operation: str, top_k: int, hidden: int) -> Spoil:
    """Arguments that agree with each other on a top_k and H outside the domain."""

    def spoil(call: Any) -> None:
        tokens, slots = 3, 5
        if operation == FINALIZE:
            call.expert_outputs = torch.ones(slots, top_k, hidden, dtype=BF16)
            call.expert_weights = torch.ones(slots, top_k)
            call.output = torch.ones(tokens, hidden, dtype=BF16)
            call.post_weight = torch.ones(hidden, dtype=BF16)
            return
        call.x.gemm2_permuted = torch.ones(slots * top_k, hidden, dtype=BF16)
        call.x.expert_weights = torch.ones(slots, top_k)
        index = torch.arange(slots * top_k, dtype=torch.int32).view(slots, top_k)
        call.x.expanded_idx_to_permuted_idx = index
        call.residual = torch.ones(tokens, hidden, dtype=BF16)
        call.post_weight = call.next_weight = torch.ones(hidden, dtype=BF16)
        if operation == GATHER:
            call.workspace.hidden_size = hidden

    return spoil


Case = tuple[str, Spoil, str, str, str]
DOMAIN, PACK = "DOMAIN-1", "PACK-1"


def tensor_cases(path: str, *, pack: bool = False, other: torch.dtype = torch.float32) -> list:
    """What every BF16 matrix is refused for: kind, dtype, rank, layout."""
    layout = PACK if pack else DOMAIN
    return [
        (put(path, lambda t: t.tolist()), DOMAIN, path, "list"),
        (put(path, lambda t: t.to(other)), DOMAIN, path, str(other)),
        (put(path, lambda t: t.to(torch.float64)), DOMAIN, path, "torch.float64"),
        (put(path, lambda t: t.flatten()), layout, path, "rank 1"),
        (put(path, lambda t: t[None]), layout, path, "rank"),
        (put(path, strided), layout, path, "strides"),
        (put(path, every_other), layout, path, "strides"),
    ]


def norm_cases(kind: str, hidden: int = 256) -> list:
    weight, eps = f"{kind}_weight", f"{kind}_eps"
    # A next weight without next_eps is legal: there is no next norm then, whatever is at hand.
    weight_alone = [(put(eps, None), DOMAIN, eps, f"None, with a {kind}_weight")]
    return [
        *(weight_alone if kind == "post" else []),
        (put(eps, -1e-6), DOMAIN, eps, "-1e-06"),
        (put(eps, NAN), DOMAIN, eps, "nan"),
        (put(eps, float("inf")), DOMAIN, eps, "inf"),
        (put(eps, "1e-6"), DOMAIN, eps, "str"),
        (put(eps, True), DOMAIN, eps, "bool"),
        (put(weight, lambda t: t.to(torch.float32)), DOMAIN, weight, "torch.float32"),
        (put(weight, lambda t: t.to(torch.float16)), DOMAIN, weight, "torch.float16"),
        (put(weight, lambda t: t[None]), DOMAIN, weight, "rank 2"),
        (put(weight, lambda t: t[: hidden - 1].clone()), DOMAIN, weight, f"[{hidden - 1}]"),
        (put(weight, lambda t: t.repeat_interleave(2)[::2]), DOMAIN, weight, "strides [2]"),
        (put(weight, meta), DOMAIN, weight, "meta"),
        (put(weight, 1.0), DOMAIN, weight, "float"),
    ]


def scales_cases() -> list:
    return [
        (put("scales", 1.0), DOMAIN, "scales", "1.0"),
        (put("scales", (1.0,)), DOMAIN, "scales", "(1.0,)"),
        (put("scales", (1.0, 2.0, 3.0)), DOMAIN, "scales", "3.0"),
        (put("scales", ("1", 2.0)), DOMAIN, "scales[0]", "str"),
        (put("scales", (1.0, None)), DOMAIN, "scales[1]", "NoneType"),
        (put("scales", (1.0, torch.tensor(2.0))), DOMAIN, "scales[1]", "Tensor"),
    ]


def beam_domain_cases(operation: str) -> list:
    rows = "expert_outputs" if operation == FINALIZE else "x.gemm2_permuted"
    top_k = "expert_outputs" if operation == FINALIZE else "x.expert_weights"
    return [
        *(
            (beam_rows(operation, 2, hidden), DOMAIN, rows, f"H = {hidden}")
            for hidden in (128, 255, 320, 2880, 8448)
        ),
        (beam_rows(operation, 33, 256), DOMAIN, top_k, "top_k 33"),
        (beam_rows(operation, 0, 256), DOMAIN, top_k, "top_k 0"),
    ]


def routed_scale_cases(name: str = "routed_scale") -> list:
    return [
        (put(name, None), DOMAIN, name, "NoneType"),
        (put(name, "2"), DOMAIN, name, "str"),
        (put(name, torch.tensor(2.0)), DOMAIN, name, "Tensor"),
    ]


def weights_cases(path: str) -> list:
    return [
        (put(path, lambda t: t.to(torch.float64)), DOMAIN, path, "torch.float64"),
        (put(path, lambda t: t.flatten()), DOMAIN, path, "rank 1"),
        (put(path, strided), DOMAIN, path, "strides"),
        (put(path, None), DOMAIN, path, "NoneType"),
    ]


def map_cases(path: str) -> list:
    return [
        (put(path, lambda t: t.to(torch.int64)), DOMAIN, path, "torch.int64"),
        (put(path, lambda t: t.flatten()), DOMAIN, path, "rank 1"),
        (put(path, strided), DOMAIN, path, "strides"),
        (put(path, meta), DOMAIN, path, "meta"),
    ]


def identity_cases() -> list:
    """Beam operations take the identity; -1, another row and a swap are not it."""

    def edit(token: int, slot: int, row: int) -> Callable[[Tensor], Tensor]:
        def change(index: Tensor) -> Tensor:
            index = index.clone()
            index[token, slot] = row
            return index

        return change

    index = "x.expanded_idx_to_permuted_idx"
    return [
        (put(index, edit(0, 1, -1)), DOMAIN, f"{index}[0, 1]", "-1"),
        (put(index, edit(2, 1, 4)), DOMAIN, f"{index}[2, 1]", "4"),
        (put(index, lambda t: t.flip(0)), DOMAIN, f"{index}[0, 0]", "8"),
        (put(index, lambda t: t.flip(1)), DOMAIN, f"{index}[0, 0]", "1"),
    ]


def beam_output_cases(operation: str) -> list:
    rows, weights = "x.gemm2_permuted", "x.expert_weights"
    index = "x.expanded_idx_to_permuted_idx"
    return [
        (put("x", None), DOMAIN, "x", "NoneType"),
        (put("x", lambda x: x.gemm2_permuted), DOMAIN, "x", "Tensor"),
        *tensor_cases(rows, pack=True, other=torch.float16),
        *weights_cases(weights),
        (put(weights, lambda t: t.to(BF16)), DOMAIN, weights, "torch.bfloat16"),
        (put(weights, lambda t: t.to(torch.float16)), DOMAIN, weights, "torch.float16"),
        *map_cases(index),
        (put(rows, meta), DOMAIN, weights, "cpu"),
        (put(rows, resized(9, 256)), DOMAIN, rows, "9 rows"),
        (put(rows, resized(4, 256)), DOMAIN, rows, "2 token slots"),
        (put(weights, resized(2, 2)), DOMAIN, weights, "2 token slots"),
        (put(index, lambda t: t[:2]), DOMAIN, index, "2 token slots"),
        (put(index, lambda t: t.view(2, 5)), DOMAIN, index, "[2, 5]"),
        *beam_domain_cases(operation),
        *identity_cases(),
        *routed_scale_cases(),
    ]


def residual_cases(tokens: int = 3) -> list:
    return [
        *tensor_cases("residual"),
        (put("residual", meta), DOMAIN, "residual", "meta"),
        (put("residual", resized(tokens, 512)), DOMAIN, "residual", f"[{tokens}, 512]"),
    ]


def strategy_cases(*allowed: str) -> list:
    empty = put("residual", resized(0, 256))
    return [
        (put("strategy", "onehot"), DOMAIN, "strategy", "'onehot'"),
        (put("strategy", ""), DOMAIN, "strategy", "''"),
        (put("strategy", 1), DOMAIN, "strategy", "1"),
        *((put("strategy", name), DOMAIN, "strategy", repr(name)) for name in allowed),
        (both(empty, put("strategy", "fastest")), DOMAIN, "strategy", "'fastest'"),
    ]


def workspace_cases() -> list:
    return [
        (put("workspace.hidden_size", 512), DOMAIN, "workspace", "hidden_size 512, H = 256"),
        (put("workspace.max_tokens", 2), DOMAIN, "residual", "3 tokens"),
        (put("workspace", None), DOMAIN, "workspace", "NoneType"),
    ]


def overlapping(of: str, *, offset: int = 0) -> Spoil:
    """A destination inside the memory of an input."""

    def spoil(call: Any) -> None:
        source = getattr(call, of)
        flat = source.view(BF16).flatten()
        need = call.output.numel()
        if flat.numel() < need + offset:
            big = torch.ones(need + offset + flat.numel(), dtype=BF16)
            big[: flat.numel()] = flat
            setattr(call, of, big[: flat.numel()].view(source.dtype).view(source.shape))
            flat = big
        call.output = flat[offset : offset + need].view(call.output.shape)

    return spoil


def moe_output_cases() -> list:
    rows, weights = "x.routed.gemm2_permuted", "x.routed.expert_weights"
    index, shared = "x.routed.expanded_idx_to_permuted_idx", "x.shared_output"

    def finalized(value: Callable[[Tensor], Tensor]) -> Spoil:
        return lambda call: setattr(
            call, "x", MoEOutput(value(torch.ones(3, 256, dtype=BF16)), None, 1.0)
        )

    def row(value: int) -> Spoil:
        def spoil(call: Any) -> None:
            call.x.routed.expanded_idx_to_permuted_idx[1, 1] = value

        return spoil

    def route_major(count: int, spoiled: int | None) -> Spoil:
        def spoil(call: Any) -> None:
            call.x.routed.route_major = True
            call.x.routed.gemm2_permuted = torch.ones(count, 256, dtype=BF16)
            identity = torch.arange(6, dtype=torch.int32).view(3, 2)
            identity[0, 0] = -1
            if spoiled is not None:
                identity[1, 1] = spoiled
            call.x.routed.expanded_idx_to_permuted_idx = identity

        return spoil

    return [
        (put("x", None), DOMAIN, "x", "NoneType"),
        (put("x", lambda x: x.routed), DOMAIN, "x", "UnfinalizedMoEOutput"),
        (put("x.routed", None), DOMAIN, "x.routed", "NoneType"),
        (put("x.routed", lambda r: (r.gemm2_permuted,)), DOMAIN, "x.routed", "tuple"),
        *tensor_cases(rows, pack=True, other=torch.float16),
        (put(rows, resized(10, 0)), DOMAIN, rows, "H = 0"),
        *weights_cases(weights),
        (put(weights, lambda t: t.to(torch.int32)), DOMAIN, weights, "torch.int32"),
        *map_cases(index),
        (put(index, lambda t: t[:2].contiguous()), DOMAIN, index, "[2, 2]"),
        (put(index, lambda t: t.view(2, 3)), DOMAIN, index, "[2, 3]"),
        (put(rows, meta), DOMAIN, weights, "cpu"),
        (row(10), DOMAIN, f"{index}[1, 1]", "10"),
        (row(-2), DOMAIN, f"{index}[1, 1]", "-2"),
        (route_major(6, 4), "PACK-3", f"{index}[1, 1]", "4"),
        (route_major(6, 0), "PACK-3", f"{index}[1, 1]", "0"),
        (route_major(5, None), "PACK-3", rows, "5 rows"),
        (route_major(8, None), "PACK-3", rows, "8 rows"),
        *tensor_cases(shared),
        (put(shared, resized(4, 256)), DOMAIN, shared, "[4, 256]"),
        (put(shared, resized(3, 512)), DOMAIN, shared, "[3, 512]"),
        (put(shared, meta), DOMAIN, shared, "meta"),
        *routed_scale_cases("x.routed_scaling_factor"),
        (finalized(lambda t: t.to(torch.float32)), DOMAIN, "x.routed", "torch.float32"),
        (finalized(lambda t: t[None]), DOMAIN, "x.routed", "rank 3"),
        (finalized(strided), DOMAIN, "x.routed", "strides"),
    ]


def finalize_cases() -> list:
    return [
        (put("expert_outputs", lambda t: t.flatten(1)), PACK, "expert_outputs", "rank 2"),
        *(case for case in tensor_cases("expert_outputs", pack=True, other=torch.float16)),
        (put("expert_outputs", lambda t: t.transpose(0, 1)), PACK, "expert_outputs", "strides"),
        *weights_cases("expert_weights"),
        (put("expert_weights", lambda t: t.to(BF16)), DOMAIN, "expert_weights", "torch.bfloat16"),
        (put("expert_weights", resized(2, 2)), DOMAIN, "expert_weights", "2 token slots"),
        (put("expert_weights", resized(5, 3)), DOMAIN, "expert_weights", "[5, 3]"),
        (put("expert_weights", meta), DOMAIN, "expert_weights", "meta"),
        *tensor_cases("output"),
        (put("output", resized(6, 256)), DOMAIN, "expert_outputs", "5 token slots"),
        (put("output", resized(3, 512)), DOMAIN, "output", "[3, 512]"),
        (put("output", meta), DOMAIN, "output", "meta"),
        *beam_domain_cases(FINALIZE),
        *routed_scale_cases(),
        *norm_cases("post"),
        (overlapping("expert_outputs"), DOMAIN, "output", "memory shared with expert_outputs"),
        (
            overlapping("expert_outputs", offset=2048),
            DOMAIN,
            "output",
            "memory shared with expert_outputs",
        ),
        (overlapping("expert_weights"), DOMAIN, "output", "memory shared with expert_weights"),
        (
            overlapping("post_weight", offset=128),
            DOMAIN,
            "output",
            "memory shared with post_weight",
        ),
    ]


TAIL = [*norm_cases("post"), *norm_cases("next"), *scales_cases()]

CASES: dict[str, list] = {
    FINALIZE: finalize_cases(),
    BOUNDARY: [
        *tensor_cases("x", other=torch.float16),
        (put("x", resized(2, 256)), DOMAIN, "residual", "[3, 256]"),
        (put("x", meta), DOMAIN, "residual", "cpu"),
        (both(put("x", resized(3, 0)), put("residual", resized(3, 0))), DOMAIN, "x", "H = 0"),
        *residual_cases(),
        *TAIL,
    ],
    FUSED: [
        *beam_output_cases(FUSED),
        *residual_cases(),
        (put("residual", resized(6, 256)), DOMAIN, "x.gemm2_permuted", "5 token slots"),
        *TAIL,
        *strategy_cases("oneshot", "twoshot", "FUSED"),
    ],
    GATHER: [
        *beam_output_cases(GATHER),
        *residual_cases(),
        (put("residual", resized(6, 256)), DOMAIN, "x.gemm2_permuted", "5 token slots"),
        *TAIL,
        *workspace_cases(),
        *strategy_cases("fused", "Oneshot"),
    ],
    MOE_OUTPUT: moe_output_cases(),
    ALLREDUCE: [
        *moe_output_cases(),
        *residual_cases(),
        (put("residual", resized(4, 256)), DOMAIN, "residual", "[4, 256]"),
        *TAIL,
        *workspace_cases(),
    ],
}


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [] if value.is_meta else [value]
    if is_dataclass(value):
        return [t for item in vars(value).values() for t in tensors_of(item)]
    return []


def memory(call: Any) -> list[Tensor]:
    """All bytes behind every argument, the gaps of strided tensors included."""
    return [
        torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).clone()
        for value in vars(call).values()
        for tensor in tensors_of(value)
    ]


def spelled(case: tuple) -> str:
    _, rule, argument, found = case
    return f"{rule}-{argument}-{found}".replace(" ", "_")


@pytest.mark.parametrize(
    ("operation", "case"),
    [
        pytest.param(name, case, id=f"{name}-{spelled(case)}-{number}")
        for name, cases in CASES.items()
        for number, case in enumerate(cases)
    ],
)
def test_refused_before_anything_changed(make_arguments, operation, case):
    spoil, rule, argument, found = case
    call = make_arguments(operation)
    spoil(call)
    before = memory(call)
    with pytest.raises(ContractError) as refusal:
        getattr(reference, operation)(**vars(call))
    assert refusal.value.rule == rule
    assert refusal.value.argument == argument
    assert found in refusal.value.found
    assert refusal.value.allowed
    for part in (rule, argument, refusal.value.found, refusal.value.allowed):
        assert part in str(refusal.value)
    after = memory(call)
    assert len(after) == len(before)
    assert all(torch.equal(now, then) for now, then in zip(after, before, strict=True))


@pytest.mark.parametrize("operation", [FINALIZE, BOUNDARY, FUSED, MOE_OUTPUT])
def test_the_unspoiled_call_is_legal(make_arguments, operation):
    call = make_arguments(operation)
    getattr(reference, operation)(**vars(call))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_operation_lacks_cases(operation):
    rules = {case[1] for case in CASES[operation]}
    assert DOMAIN in rules
    assert (PACK in rules) == (operation != BOUNDARY)


def test_arguments_may_be_positional_in_the_contracts_order(make_arguments):
    for operation in (FINALIZE, BOUNDARY, FUSED):
        call = vars(make_arguments(operation))
        call.pop("strategy", None)
        getattr(reference, operation)(*call.values())
