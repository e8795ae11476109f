"""Operation 3, ``beam_moe_finalize``."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moetail import reference

NAN, INF = float("nan"), float("inf")


def destination(tokens: int, hidden: int) -> torch.Tensor:
    return torch.full((tokens, hidden), NAN, dtype=torch.bfloat16)


def identity(tokens: int, top_k: int) -> torch.Tensor:
    return torch.arange(tokens * top_k, dtype=torch.int32).view(tokens, top_k)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(1, 6),
    spare=st.integers(0, 3),
    top_k=st.integers(1, 32),
    hidden=st.sampled_from([256, 512, 768]),
    scale=st.sampled_from([1.0, 2.5, 0.3, -1.7, 0.0, 3, 1e-30]),
)
def test_bits_on_a_grid(oracle, make_grid, seed, tokens, spare, top_k, hidden, scale):
    grid = make_grid(seed)
    rows = grid.rows(tokens + spare, top_k, hidden)
    weights = grid.weights(tokens + spare, top_k)
    expected = oracle.finalize(
        rows.view(-1, hidden), weights[:tokens], identity(tokens, top_k), scale
    )
    output = destination(tokens, hidden)
    result = reference.beam_moe_finalize(rows, weights, output, scale)
    assert result is output
    assert oracle.same_bits(output, expected)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), top_k=st.integers(1, 32))
def test_random_values_stay_within_every_order(oracle, seed, top_k):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(4, top_k, 256, generator=generator).to(torch.bfloat16)
    weights = torch.rand(4, top_k, generator=generator)
    allowed = oracle.reduction(rows.view(-1, 256), weights, identity(4, top_k))
    output = reference.beam_moe_finalize(rows, weights, destination(4, 256))
    assert allowed.holds(output)
    assert allowed.decided() > 0.95


def test_the_sum_is_rounded_before_the_scale_and_after_it(oracle):
    """257 / 256 is a tie that goes to 1; times 1 + 2^-7 it would not have been."""
    rows = torch.ones(1, 2, 256, dtype=torch.bfloat16)
    weights = torch.tensor([[1.0, 2.0**-8]])
    scale = 1.0 + 2.0**-7
    output = reference.beam_moe_finalize(rows, weights, destination(1, 256), scale)
    fused = oracle.round_bits(torch.tensor([(1.0 + 2.0**-8) * scale], dtype=torch.float32))
    assert float(fused) != scale
    assert bool((output == scale).all())


def test_the_sum_accumulates_in_fp32():
    """1 + 2^-9 + ... + 2^-9: a BF16 accumulator stays at 1, FP32 reaches 1 + 2^-5."""
    rows = torch.ones(1, 17, 256, dtype=torch.bfloat16)
    weights = torch.tensor([[1.0] + [2.0**-9] * 16])
    output = reference.beam_moe_finalize(rows, weights, destination(1, 256))
    assert bool((output == 1.0 + 2.0**-5).all())


@pytest.mark.parametrize(("eps", "inverse"), [(0.0, 1.0), (3.0, 0.5), (15.0, 0.25)])
@pytest.mark.parametrize("affine", [False, True])
def test_post_norm_of_exact_rows(oracle, grid, eps, inverse, affine):
    """Rows of +-1 have a mean square of 1, so the inverse RMS is a power of two."""
    signs = grid.signs(3, 1, 512)
    weight = grid.affine(512) if affine else None
    expected = signs[:, 0].to(torch.float64) * inverse
    if weight is not None:
        expected = expected * weight.to(torch.float64)
    output = destination(3, 512)
    reference.beam_moe_finalize(signs, torch.ones(3, 1), output, 1.0, weight, eps)
    assert oracle.same_bits(output, oracle.round_exact(expected))


def test_post_norm_takes_the_scaled_and_rounded_sum(oracle, grid):
    rows, weights = grid.rows(5, 4, 256), grid.weights(5, 4)
    weight = grid.affine(256)
    scaled = oracle.finalize(rows.view(-1, 256), weights, identity(5, 4), 0.37)
    allowed = oracle.norm(scaled, weight, 1e-5)
    output = reference.beam_moe_finalize(rows, weights, destination(5, 256), 0.37, weight, 1e-5)
    assert allowed.holds(output)
    assert allowed.decided() > 0.95


def test_affine_multiply_comes_before_the_rounding(oracle, grid):
    """An implementation with Hugging Face's order falls outside what is allowed here."""
    rows, weight = grid.rows(4, 1, 256), grid.affine(256)
    allowed = oracle.norm(rows[:, 0], weight, 1e-6)
    early = oracle.norm(rows[:, 0], None, 1e-6).low.to(torch.float32) * weight.to(torch.float32)
    assert not allowed.holds(oracle.round_bits(early))
    output = destination(4, 256)
    reference.beam_moe_finalize(rows, torch.ones(4, 1), output, 1.0, weight, 1e-6)
    assert allowed.holds(output)


@pytest.mark.parametrize("poison", [NAN, INF, 1e30])
def test_only_live_slots_are_read(oracle, grid, poison):
    rows, weights = grid.rows(6, 3, 256), grid.weights(6, 3)
    expected = oracle.finalize(rows.view(-1, 256), weights[:4], identity(4, 3), 1.5)
    rows[4:], weights[4:] = poison, poison
    output = reference.beam_moe_finalize(rows, weights, destination(4, 256), 1.5)
    assert oracle.same_bits(output, expected)


def test_weights_may_be_only_the_live_ones(oracle, grid):
    rows, weights = grid.rows(6, 3, 256), grid.weights(4, 3)
    expected = oracle.finalize(rows.view(-1, 256), weights, identity(4, 3), 1.0)
    output = reference.beam_moe_finalize(rows, weights, destination(4, 256))
    assert oracle.same_bits(output, expected)


@pytest.mark.parametrize("capacity", [0, 5])
@pytest.mark.parametrize("eps", [None, 1e-6])
def test_zero_live_tokens(grid, capacity, eps):
    output = torch.empty(0, 256, dtype=torch.bfloat16)
    rows, weights = grid.rows(capacity, 2, 256), grid.weights(capacity, 2)
    assert reference.beam_moe_finalize(rows, weights, output, 2.0, None, eps) is output


def test_nan_and_infinity_propagate_as_ieee_says(grid):
    rows, weights = grid.rows(4, 2, 256), grid.weights(4, 2)
    rows[0, 0, 5] = NAN
    rows[1, 1, 6] = INF
    rows[2, 0, 7], rows[2, 1, 7] = INF, -INF
    rows[3, 0, 8], weights[3, 0] = INF, 0.0
    output = reference.beam_moe_finalize(rows, weights, destination(4, 256), -2.0)
    assert output.isnan().nonzero().tolist() == [[0, 5], [2, 7], [3, 8]]
    assert output.isinf().nonzero().tolist() == [[1, 6]]
    assert float(output[1, 6]) == -INF


def test_a_nan_spreads_over_its_row_in_the_norm_and_no_further(grid):
    rows, weights = grid.rows(3, 2, 256), grid.weights(3, 2)
    rows[1, 0, 5] = NAN
    output = reference.beam_moe_finalize(rows, weights, destination(3, 256), 1.0, None, 1e-6)
    assert output.isnan().all(dim=1).tolist() == [False, True, False]
    assert output.isnan().any(dim=1).tolist() == [False, True, False]


@pytest.mark.parametrize("scale", [-0.0, 0.0])
def test_a_zero_scale_gives_zero(grid, scale):
    output = destination(2, 256)
    reference.beam_moe_finalize(grid.rows(2, 2, 256), grid.weights(2, 2), output, scale)
    assert bool((output == 0.0).all())


def test_a_nan_scale_gives_nan(grid):
    output = torch.zeros(2, 256, dtype=torch.bfloat16)
    reference.beam_moe_finalize(grid.rows(2, 2, 256), grid.weights(2, 2), output, NAN)
    assert bool(output.isnan().all())


def test_a_zero_row_with_eps_zero_is_nan_as_ieee_says():
    rows = torch.zeros(1, 1, 256, dtype=torch.bfloat16)
    output = torch.zeros(1, 256, dtype=torch.bfloat16)
    reference.beam_moe_finalize(rows, torch.ones(1, 1), output, 1.0, None, 0.0)
    assert bool(output.isnan().all())


@pytest.mark.parametrize("hidden", [256, 2816, 8192])
@pytest.mark.parametrize("top_k", [1, 32])
def test_ends_of_the_domain(oracle, grid, hidden, top_k):
    rows, weights = grid.rows(1, top_k, hidden), grid.weights(1, top_k)
    expected = oracle.finalize(rows.view(-1, hidden), weights, identity(1, top_k), 1.0)
    output = reference.beam_moe_finalize(rows, weights, destination(1, hidden))
    assert oracle.same_bits(output, expected)


def test_inputs_keep_their_bits_and_runs_agree(oracle, grid):
    tensors = grid.rows(5, 4, 256), grid.weights(5, 4), grid.affine(256)
    before = [tensor.clone() for tensor in tensors]
    rows, weights, weight = tensors
    runs = [
        reference.beam_moe_finalize(rows, weights, destination(5, 256), 1.3, weight, 1e-6)
        for _ in range(3)
    ]
    assert all(torch.equal(now, then) for now, then in zip(tensors, before, strict=True))
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])
