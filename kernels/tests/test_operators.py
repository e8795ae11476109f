"""What needs no GPU: registration, shapes, compilation, refusals, and the reference behind it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import moetail.kernels
import moetail.reference
from moetail.kernels import operators
from moetail.spec import ContractError, MoEOutput, UnfinalizedMoEOutput

TOKENS, TOP_K, HIDDEN = 3, 2, 256


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


def identity(tokens: int = TOKENS, top_k: int = TOP_K) -> Tensor:
    return torch.arange(tokens * top_k, dtype=torch.int32).view(tokens, top_k)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def cases() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """An operator and arguments of each kind."""
    rows, weights = bf16(TOKENS * TOP_K, HIDDEN), torch.rand(TOKENS, TOP_K)
    residual, weight = bf16(TOKENS, HIDDEN), bf16(HIDDEN)
    permuted = identity().flip(0).contiguous()
    permuted[0, 1] = -1
    tail = (weight, 1e-6, weight, 1e-5, 0.5, 1.5)
    return {
        "finalize": (operators.finalize, (rows, weights, permuted, residual, 2.0)),
        "finalize-bf16": (operators.finalize, (rows, weights.bfloat16(), permuted, None, 1.0)),
        "finalize-routed": (operators.finalize, (residual, None, None, residual.clone(), 2.0)),
        "finalize_into": (
            operators.finalize_into,
            (rows.view(TOKENS, TOP_K, HIDDEN), weights, bf16(TOKENS, HIDDEN), 2.0, weight, 1e-6),
        ),
        "boundary": (operators.boundary, (bf16(TOKENS, HIDDEN), residual, *tail)),
        "boundary-bare": (
            operators.boundary,
            (bf16(TOKENS, HIDDEN), residual, None, None, None, None, 1.0, 1.0),
        ),
        "finalize_boundary": (
            operators.finalize_boundary,
            (rows, weights, identity(), residual, *tail, 2.0),
        ),
    }


@pytest.mark.parametrize("name", list(cases()))
def test_opcheck(name: str) -> None:
    operator, arguments = cases()[name]
    torch.library.opcheck(operator, arguments)


@pytest.mark.parametrize("name", ["finalize", "finalize_into", "boundary", "finalize_boundary"])
def test_registered_for_cpu_cuda_and_meta(name: str) -> None:
    for key in ("CPU", "CUDA", "Meta"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"moetail::{name}", key)


def test_meta_gives_shapes() -> None:
    rows = torch.empty(9, HIDDEN, dtype=torch.bfloat16, device="meta")
    weights = torch.empty(4, TOP_K, device="meta")
    index = torch.empty(4, TOP_K, dtype=torch.int32, device="meta")
    x = UnfinalizedMoEOutput(rows, weights, index)
    assert moetail.kernels.finalize_moe_output(MoEOutput(x)).shape == (4, HIDDEN)
    x = UnfinalizedMoEOutput(rows[:8], weights, index)
    residual = torch.empty(3, HIDDEN, dtype=torch.bfloat16, device="meta")
    hidden, normalized = moetail.kernels.beam_moe_finalize_norm_residual_norm(
        x, residual, None, None, None, 1e-6, None
    )
    assert hidden.shape == (3, HIDDEN)
    assert normalized is not None
    assert normalized.shape == (3, HIDDEN)


def layer(rows: Tensor, weights: Tensor, index: Tensor, residual: Tensor, weight: Tensor) -> Any:
    """A small layer's tail, with arithmetic of its own around the operators."""
    x = UnfinalizedMoEOutput(rows * 2, weights, index)
    hidden, normalized = moetail.kernels.beam_moe_finalize_norm_residual_norm(
        x, residual, weight, 1e-6, weight, 1e-5, (0.5, 1.0), 1.5
    )
    assert normalized is not None
    routed = moetail.kernels.finalize_moe_output(MoEOutput(x, normalized, 0.5))
    output = torch.empty_like(routed)
    moetail.kernels.beam_moe_finalize(x.gemm2_permuted.view(-1, TOP_K, HIDDEN), weights, output)
    again, nothing = moetail.kernels.beam_norm_residual_norm(
        output, routed, None, None, None, None, None
    )
    assert nothing is None
    return hidden + again, normalized


def test_compiles_to_one_graph() -> None:
    arguments = (
        bf16(TOKENS * TOP_K, HIDDEN),
        torch.rand(TOKENS, TOP_K),
        identity(),
        bf16(TOKENS, HIDDEN),
        bf16(HIDDEN),
    )
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for expected, found in zip(layer(*arguments), compiled(*arguments), strict=True):
        assert torch.equal(expected, found)


def test_cpu_tensors_give_the_references_bits() -> None:
    x = UnfinalizedMoEOutput(bf16(12, HIDDEN), torch.rand(TOKENS, TOP_K), identity())
    arguments = (x, bf16(TOKENS, HIDDEN), bf16(HIDDEN), 1e-6, None, 1e-5, None)
    for strategy in ("fused", "unfused"):
        expected = moetail.reference.beam_moe_finalize_norm_residual_norm(
            *arguments, strategy=strategy
        )
        found = moetail.kernels.beam_moe_finalize_norm_residual_norm(*arguments, strategy=strategy)
        assert torch.equal(expected[0], found[0])
        assert expected[1] is not None
        assert found[1] is not None
        assert torch.equal(expected[1], found[1])


def test_no_tokens() -> None:
    empty = bf16(0, HIDDEN)
    x = UnfinalizedMoEOutput(bf16(4, HIDDEN), torch.rand(2, TOP_K), identity(2))
    hidden, normalized = moetail.kernels.beam_moe_finalize_norm_residual_norm(
        x, empty, None, None, None, None, None
    )
    assert hidden.shape == (0, HIDDEN)
    assert normalized is None


@pytest.mark.parametrize("hidden", [128, 300, 8448])
def test_refuses_as_the_reference_and_changes_nothing(hidden: int) -> None:
    rows, weights = bf16(TOKENS, TOP_K, hidden), torch.rand(TOKENS, TOP_K)
    output = bf16(TOKENS, hidden)
    before = output.clone()
    messages = []
    for implementation in (moetail.reference, moetail.kernels):
        with pytest.raises(ContractError, match=r"\[DOMAIN-1\]") as refusal:
            implementation.beam_moe_finalize(rows, weights, output)
        messages.append(str(refusal.value))
    assert messages[0] == messages[1]
    assert torch.equal(output, before)


def test_a_map_that_is_not_the_identity_is_refused_on_cpu() -> None:
    index = identity().flip(0).contiguous()
    x = UnfinalizedMoEOutput(bf16(TOKENS * TOP_K, HIDDEN), torch.rand(TOKENS, TOP_K), index)
    with pytest.raises(ContractError, match="identity"):
        moetail.kernels.beam_moe_finalize_norm_residual_norm(
            x, bf16(TOKENS, HIDDEN), None, None, None, None, None
        )


def test_nothing_to_finalize_copies_nothing() -> None:
    routed = bf16(TOKENS, HIDDEN)
    assert moetail.kernels.finalize_moe_output(MoEOutput(routed)) is routed
