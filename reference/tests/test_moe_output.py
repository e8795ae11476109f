"""Operation 8's local half, ``finalize_moe_output``."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moetail import reference
from moetail.spec import MoEOutput, UnfinalizedMoEOutput

NAN, INF = float("nan"), float("inf")


def produce(grid, *, tokens, top_k, hidden, padding, remote, dtype=torch.float32):
    """A permuted output: routes at random rows, poison in every row that none maps to."""
    routes = tokens * top_k
    index = grid.permutation(routes + padding)[:routes].to(torch.int32).view(tokens, top_k)
    if remote:
        index[grid.integers((tokens, top_k), 0, 100) < remote] = -1
    rows = torch.full((routes + padding, hidden), NAN, dtype=torch.bfloat16)
    used = index[index >= 0].long()
    rows[used] = grid.rows(len(used), hidden)
    weights = grid.weights(tokens, top_k, dtype=dtype)
    weights[index < 0] = NAN
    return UnfinalizedMoEOutput(rows, weights, index)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(0, 6),
    top_k=st.integers(1, 9),
    hidden=st.sampled_from([1, 24, 256, 2880]),
    padding=st.integers(0, 7),
    remote=st.sampled_from([0, 30, 80, 100]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    factor=st.sampled_from([1.0, 2.5, 0.3, 2]),
    shared=st.booleans(),
)
def test_bits_on_a_grid(
    oracle, make_grid, seed, tokens, top_k, hidden, padding, remote, dtype, factor, shared
):
    grid = make_grid(seed)
    unfinalized = produce(
        grid,
        tokens=tokens,
        top_k=top_k,
        hidden=hidden,
        padding=padding,
        remote=remote,
        dtype=dtype,
    )
    part = grid.rows(tokens, hidden) if shared else None
    tensors = [unfinalized.gemm2_permuted, unfinalized.expert_weights]
    before = [oracle.raw(tensor) for tensor in tensors]
    expected = oracle.finalize(
        unfinalized.gemm2_permuted,
        unfinalized.expert_weights,
        unfinalized.expanded_idx_to_permuted_idx,
        factor,
    )
    if part is not None:
        expected = oracle.plus(expected, part)
    result = reference.finalize_moe_output(MoEOutput(unfinalized, part, factor))
    assert result.shape == (tokens, hidden)
    assert oracle.same_bits(result, expected)
    assert [oracle.raw(tensor) for tensor in tensors] == before


@pytest.mark.parametrize("shared", [False, True])
def test_permuting_rows_with_the_map_changes_no_bit(grid, shared):
    """On values that are on no grid, so that another order of summation would show."""
    rows = torch.randn(48, 256, generator=grid.generator).to(torch.bfloat16)
    weights = torch.rand(6, 8, generator=grid.generator)
    index = torch.arange(48, dtype=torch.int32).view(6, 8)
    part = grid.rows(6, 256) if shared else None
    first = reference.finalize_moe_output(
        MoEOutput(UnfinalizedMoEOutput(rows, weights, index), part, 1.7)
    )
    for _ in range(5):
        to = grid.permutation(48)
        moved = torch.empty_like(rows)
        moved[to] = rows
        again = reference.finalize_moe_output(
            MoEOutput(
                UnfinalizedMoEOutput(moved, weights, to.to(torch.int32).view(6, 8)), part, 1.7
            )
        )
        assert torch.equal(first, again)


@pytest.mark.parametrize("poison", [NAN, INF, -INF, 1e30])
def test_a_remote_route_adds_nothing(grid, poison):
    """Neither row 0 nor the last row, nor its own weight, may reach the token."""
    rows = grid.rows(4, 256)
    rows[0], rows[-1] = poison, poison
    index = torch.tensor([[1, -1], [-1, 2], [-1, -1]], dtype=torch.int32)
    weights = torch.tensor([[1.0, poison], [poison, 1.0], [poison, poison]])
    output = reference.finalize_moe_output(MoEOutput(UnfinalizedMoEOutput(rows, weights, index)))
    assert torch.equal(output[:2], rows[1:3] + 0.0)
    assert bool((output[2] == 0.0).all())


@pytest.mark.parametrize("hidden", [256, 40])
def test_all_remote_with_no_rows_at_all(hidden):
    """A rank without work may hold zero rows."""
    unfinalized = UnfinalizedMoEOutput(
        torch.empty(0, hidden, dtype=torch.bfloat16),
        torch.full((5, 3), NAN),
        torch.full((5, 3), -1, dtype=torch.int32),
    )
    assert bool((reference.finalize_moe_output(MoEOutput(unfinalized, None, 2.0)) == 0.0).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_are_read_in_the_dtype_they_have(dtype):
    """1 + 2^-10 is FP32 and FP16 but not BF16; the row makes the difference show."""
    weights = torch.tensor([[1.0 + 2.0**-10, -1.0]]).to(dtype)
    rows = torch.ones(2, 256, dtype=torch.bfloat16)
    index = torch.tensor([[0, 1]], dtype=torch.int32)
    output = reference.finalize_moe_output(MoEOutput(UnfinalizedMoEOutput(rows, weights, index)))
    assert bool((output == (0.0 if dtype is torch.bfloat16 else 2.0**-10)).all())


def test_the_same_row_may_serve_several_routes(oracle, grid):
    rows, weights = grid.rows(2, 256), grid.weights(3, 4)
    index = grid.integers((3, 4), -1, 2).to(torch.int32)
    output = reference.finalize_moe_output(MoEOutput(UnfinalizedMoEOutput(rows, weights, index)))
    assert oracle.same_bits(output, oracle.finalize(rows, weights, index, 1.0))


def test_nan_and_infinity_in_live_routes_propagate(grid):
    rows = grid.rows(4, 256)
    rows[0, 3], rows[1, 3] = INF, -INF
    rows[2, 4] = NAN
    index = torch.tensor([[0, 1], [0, 2], [2, 3], [1, 1]], dtype=torch.int32)
    unfinalized = UnfinalizedMoEOutput(rows, torch.ones(4, 2), index)
    output = reference.finalize_moe_output(MoEOutput(unfinalized))
    assert output.isnan().nonzero().tolist() == [[0, 3], [1, 4], [2, 4]]
    assert output.isinf().nonzero().tolist() == [[1, 3], [3, 3]]


@pytest.mark.parametrize("factor", [1.0, 0.3])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("tokens", [0, 4])
def test_a_finalized_routed_part(oracle, grid, factor, shared, tokens):
    routed = grid.rows(tokens, 40)
    part = grid.rows(tokens, 40) if shared else None
    before = routed.clone()
    expected = oracle.times(routed, factor)
    if part is not None:
        expected = oracle.plus(expected, part)
    output = reference.finalize_moe_output(MoEOutput(routed, part, factor))
    assert oracle.same_bits(output, expected)
    assert torch.equal(routed, before)


def test_the_shared_part_is_not_scaled():
    routed = torch.full((1, 256), 2.0, dtype=torch.bfloat16)
    shared = torch.full((1, 256), 3.0, dtype=torch.bfloat16)
    assert bool((reference.finalize_moe_output(MoEOutput(routed, shared, 4.0)) == 11.0).all())


def test_the_scaled_sum_is_rounded_before_the_shared_add():
    """1.0 * (1 + 2^-8) is a tie that goes to 1, so that minus 1 leaves nothing."""
    routed = torch.ones(1, 256, dtype=torch.bfloat16)
    output = reference.finalize_moe_output(MoEOutput(routed, -routed, 1.0 + 2.0**-8))
    assert bool((output == 0.0).all())


def test_route_major_and_permuted_agree(oracle, grid):
    rows, weights = grid.rows(12, 256), grid.weights(4, 3)
    ids = grid.integers((4, 3), 0, 6)
    expert_map = torch.tensor([-1, 0, -5, 1, 2, -1], dtype=torch.int32)
    output = reference.route_major_moe_output(rows.view(4, 3, 256), weights, ids, expert_map)
    remote = expert_map[ids] < 0
    rows.view(4, 3, 256)[remote] = NAN
    index = torch.where(remote, -1, torch.arange(12).view(4, 3)).to(torch.int32)
    result = reference.finalize_moe_output(MoEOutput(output, None, 2.5))
    assert oracle.same_bits(result, oracle.finalize(rows, weights, index, 2.5))
