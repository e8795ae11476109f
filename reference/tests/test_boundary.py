"""Operations 4 and 5: the boundary, alone and after a finalization."""

from __future__ import annotations

import itertools

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moetail import reference

NAN = float("nan")
optional_eps = st.sampled_from([None, 0.0, 1e-6, 1e-5, 0.5])
optional_scales = st.sampled_from([None, (1.0, 1.0), (0.22, 1.4), (-0.5, 0.0), (2, 3)])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(1, 5),
    hidden=st.sampled_from([1, 2, 7, 100, 256, 2880]),
    post_eps=optional_eps,
    next_eps=optional_eps,
    affine=st.booleans(),
    scales=optional_scales,
)
def test_boundary_is_legal(
    oracle, make_grid, seed, tokens, hidden, post_eps, next_eps, affine, scales
):
    """Any H >= 1: the contract bounds H for operations 3, 5 and 6 only."""
    grid = make_grid(seed)
    x, residual = grid.rows(tokens, hidden), grid.rows(tokens, hidden)
    x[:, 0], residual[:, 0] = 1.0, 2.0  # no zero rows, so that eps = 0 is defined
    post_weight = grid.affine(hidden) if affine and post_eps is not None else None
    next_weight = grid.affine(hidden) if affine and next_eps is not None else None
    arguments = (x, residual, post_weight, post_eps, next_weight, next_eps, scales)
    result = reference.beam_norm_residual_norm(*arguments)
    oracle.assert_boundary(*arguments, result, decided=0.9 if tokens * hidden > 500 else 0.0)


@pytest.mark.parametrize("scales", [None, (1.0, 1.0), (0.22, 1.4), (0.1, 1 / 3)])
def test_residual_add_has_one_answer(oracle, grid, scales):
    x, residual = grid.rows(4, 320), grid.rows(4, 320)
    hidden, normalized = reference.beam_norm_residual_norm(
        x, residual, None, None, None, None, scales
    )
    a, b = (x, residual)
    if scales is not None:
        a, b = oracle.times(x, scales[0]), oracle.times(residual, scales[1])
    assert oracle.same_bits(hidden, oracle.plus(a, b))
    assert normalized is None


def test_each_product_is_rounded_before_the_sum(oracle):
    """(1 + 2^-7)^2 = 1 + 2^-6 + 2^-14 loses its last term before the cancelling add."""
    x = torch.full((1, 256), 1.0 + 2.0**-7, dtype=torch.bfloat16)
    residual = torch.full((1, 256), -(1.0 + 2.0**-6), dtype=torch.bfloat16)
    hidden, _ = reference.beam_norm_residual_norm(
        x, residual, None, None, None, None, (1.0 + 2.0**-7, 1.0)
    )
    assert bool((hidden == 0.0).all())


@pytest.mark.parametrize(("eps", "inverse"), [(0.0, 1.0), (3.0, 0.5)])
def test_exact_norms_on_both_sides(oracle, grid, eps, inverse):
    """Signs in, zero residual: hidden = +-weight / 2^n; a next norm over a hidden of +-4."""
    signs, weight = grid.signs(3, 256), grid.affine(256)
    zero = torch.zeros(3, 256, dtype=torch.bfloat16)
    hidden, _ = reference.beam_norm_residual_norm(signs, zero, weight, eps, None, None, None)
    expected = oracle.round_exact(signs.to(torch.float64) * inverse * weight.to(torch.float64))
    assert oracle.same_bits(hidden, expected)
    hidden, normalized = reference.beam_norm_residual_norm(
        signs * 4, zero, None, None, weight, 0.0, None
    )
    expected = oracle.round_exact(signs.to(torch.float64) * weight.to(torch.float64))
    assert oracle.same_bits(normalized, expected)


def test_next_norm_takes_the_rounded_hidden(oracle):
    """4 + 2^-6 rounds to 4, so the norm of each element is exactly 1."""
    x = torch.full((2, 256), 4.0, dtype=torch.bfloat16)
    residual = torch.full((2, 256), 2.0**-6, dtype=torch.bfloat16)
    hidden, normalized = reference.beam_norm_residual_norm(x, residual, None, None, None, 0.0, None)
    assert bool((hidden == 4.0).all())
    assert bool((normalized == 1.0).all())
    # Only some elements round away, so that the mean of squares shows which value was taken.
    x[:, ::2], residual[:, ::2] = 2.0**-6, 0.0
    arguments = (x, residual, None, None, None, 0.0, None)
    oracle.assert_boundary(*arguments, reference.beam_norm_residual_norm(*arguments))


@pytest.mark.parametrize("hidden", [7, 100, 2880])
def test_mean_is_over_exactly_h(oracle, grid, hidden):
    """Over a padded width the inverse RMS of +-1 would not be 1."""
    signs = grid.signs(2, hidden)
    zero = torch.zeros(2, hidden, dtype=torch.bfloat16)
    out, normalized = reference.beam_norm_residual_norm(signs, zero, None, 0.0, None, 0.0, None)
    assert oracle.same_bits(out, signs)
    assert oracle.same_bits(normalized, signs)


def test_eps_decides_for_tiny_rows(oracle):
    """Mean square 2^-40 beside eps = 3 * 2^-40 gives an inverse RMS of 2^19."""
    x = torch.full((2, 256), 2.0**-20, dtype=torch.bfloat16)
    zero = torch.zeros_like(x)
    hidden, _ = reference.beam_norm_residual_norm(x, zero, None, 3 * 2.0**-40, None, None, None)
    assert bool((hidden == 0.5).all())


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize(("post_eps", "next_eps"), list(itertools.product([None, 1e-6], repeat=2)))
def test_normalized_is_none_exactly_when_next_eps_is(grid, tokens, post_eps, next_eps):
    x, residual = grid.rows(tokens, 256), grid.rows(tokens, 256)
    hidden, normalized = reference.beam_norm_residual_norm(
        x, residual, None, post_eps, None, next_eps, None
    )
    assert hidden.shape == (tokens, 256)
    assert hidden.dtype is torch.bfloat16
    assert (normalized is None) == (next_eps is None)
    if normalized is not None:
        assert normalized.shape == (tokens, 256)
        assert normalized.dtype is torch.bfloat16


def test_next_eps_alone_says_whether_there_is_a_next_norm(grid):
    x, residual, weight = grid.rows(2, 256), grid.rows(2, 256), grid.affine(256)
    bare = reference.beam_norm_residual_norm(x, residual, None, None, None, None, None)
    held = reference.beam_norm_residual_norm(x, residual, None, None, weight, None, None)
    assert held[1] is None
    assert torch.equal(held[0], bare[0])


@pytest.mark.parametrize(
    ("eps", "scales"),
    [
        (1, (1, 2)),
        (numpy.float32(1.0), (numpy.float64(1.0), numpy.int64(2))),
        (numpy.float64(1.0), [1.0, 2.0]),
    ],
)
def test_numbers_of_other_types_mean_the_same(oracle, grid, eps, scales):
    x, residual = grid.rows(3, 256), grid.rows(3, 256)
    expected = reference.beam_norm_residual_norm(x, residual, None, 1.0, None, 1.0, (1.0, 2.0))
    result = reference.beam_norm_residual_norm(x, residual, None, eps, None, eps, scales)
    assert torch.equal(result[0], expected[0])
    assert torch.equal(result[1], expected[1])


@pytest.mark.parametrize("strategy", [None, "fused", "unfused"])
@pytest.mark.parametrize("spare", [0, 2])
@pytest.mark.parametrize("top_k", [1, 8])
@pytest.mark.parametrize("tail", ["bare", "full"])
def test_fused_on_a_grid(oracle, grid, make_beam_output, strategy, spare, top_k, tail):
    tokens, hidden_size = 4, 512
    x = make_beam_output(grid, tokens + spare, top_k, hidden_size)
    finalized = oracle.finalize(
        x.gemm2_permuted, x.expert_weights, x.expanded_idx_to_permuted_idx[:tokens], 2.5
    )
    # What lies past the live slots must not matter: rows, weights, nor the map.
    x.gemm2_permuted[tokens * top_k :] = NAN
    x.expert_weights[tokens:] = NAN
    x.expanded_idx_to_permuted_idx[tokens:] = -7
    residual = grid.rows(tokens, hidden_size)
    arguments = (None, None, None, None, None)
    if tail == "full":
        arguments = (grid.affine(hidden_size), 1e-5, grid.affine(hidden_size), 1e-6, (0.7, 1.3))
    result = reference.beam_moe_finalize_norm_residual_norm(
        x, residual, *arguments, 2.5, strategy=strategy
    )
    oracle.assert_boundary(finalized, residual, *arguments, result)


@pytest.mark.parametrize("strategy", [None, "fused", "unfused"])
@pytest.mark.parametrize("next_eps", [None, 1e-6])
def test_fused_with_zero_live_tokens(grid, make_beam_output, strategy, next_eps):
    for slots in (0, 3):
        x = make_beam_output(grid, slots, 2, 256)
        residual = torch.empty(0, 256, dtype=torch.bfloat16)
        hidden, normalized = reference.beam_moe_finalize_norm_residual_norm(
            x, residual, None, None, None, next_eps, None, strategy=strategy
        )
        assert hidden.shape == (0, 256)
        assert (normalized is None) == (next_eps is None)


def test_outputs_are_new_tensors_and_inputs_keep_their_bits(grid, make_beam_output):
    x = make_beam_output(grid, 3, 2, 256)
    residual = grid.rows(3, 256)
    inputs = [x.gemm2_permuted, x.expert_weights, x.expanded_idx_to_permuted_idx, residual]
    before = [tensor.clone() for tensor in inputs]
    hidden, normalized = reference.beam_moe_finalize_norm_residual_norm(
        x, residual, None, 1e-6, None, 1e-6, (1.0, 1.0)
    )
    hidden.fill_(9.0)
    normalized.fill_(9.0)
    boundary, _ = reference.beam_norm_residual_norm(
        residual, residual, None, None, None, None, None
    )
    boundary.fill_(9.0)
    assert all(torch.equal(now, then) for now, then in zip(inputs, before, strict=True))
