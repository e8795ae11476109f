"""What holds of the arguments whatever the values: maps, poison, slots, ownership, sharding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from conformance.tests.cases.strategies import case_strategy
from moetail.conformance.cases import CALLED, POISONS, Case
from moetail.conformance.cases.case import problem_of
from moetail.conformance.cases.problem import REMOTE
from moetail.spec import MoEOutput, UnfinalizedMoEOutput, checks

FINALIZE = "beam_moe_finalize"
FUSED = "beam_moe_finalize_norm_residual_norm"
GATHER = "beam_moe_finalize_gather_norm_residual_norm"
MOE_OUTPUT = "finalize_moe_output"
ALLREDUCE = "beam_finalize_allreduce_norm_residual_norm"
QUIET = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=40)


def is_poison(tensor: torch.Tensor, poison: str) -> bool:
    if poison == "nan":
        return bool(tensor.isnan().all())
    if poison == "inf":
        return bool(tensor.isinf().all())
    if poison == "huge":
        return bool((tensor.abs().float() >= min(3e38, torch.finfo(tensor.dtype).max)).all())
    return bool(tensor.isfinite().all())


def unfinalized(arguments: dict[str, Any]) -> UnfinalizedMoEOutput:
    x = arguments["x"]
    made = x.routed if isinstance(x, MoEOutput) else x
    assert isinstance(made, UnfinalizedMoEOutput)
    return made


@given(case_strategy(MOE_OUTPUT, max_hidden=256).filter(lambda case: case.routed == "routes"))
@QUIET
def test_a_moe_output_holds_each_route_once_and_poison_elsewhere(case: Case) -> None:
    x = unfinalized(case.arguments())
    problem = problem_of(case)
    index = x.expanded_idx_to_permuted_idx
    local = problem.routing.owners != REMOTE
    assert torch.equal(index >= 0, local)
    assert bool((index[~local] == -1).all())
    used = index[local].long()
    assert len(set(used.tolist())) == used.numel()
    rows = x.gemm2_permuted[used].view(torch.int16)
    assert torch.equal(rows, problem.rows[local].view(torch.int16))
    unused = torch.ones(len(x.gemm2_permuted), dtype=torch.bool)
    unused[used] = False
    assert is_poison(x.gemm2_permuted[unused], case.poison)
    checks.check(MOE_OUTPUT, {"x": MoEOutput(x)})
    checks.check_values(MOE_OUTPUT, {"x": MoEOutput(x)})


@given(case_strategy(MOE_OUTPUT, sources=["normal"], max_hidden=256))
@QUIET
def test_permuted_rows_are_grouped_by_expert_on_tile_boundaries(case: Case) -> None:
    if case.layout != "permuted" or case.routed != "routes":
        return
    x = unfinalized(case.arguments())
    routing = problem_of(case).routing
    index = x.expanded_idx_to_permuted_idx
    last = -1
    for expert in sorted(set(routing.ids[index >= 0].tolist())):
        rows = index[(routing.ids == expert) & (index >= 0)].sort().values
        start = int(rows[0])
        assert start % case.tile == 0
        assert rows.tolist() == list(range(start, start + len(rows)))
        assert start > last
        last = int(rows[-1])


@pytest.mark.parametrize("top_k", [1, 4])
def test_route_major_has_every_row(top_k: int) -> None:
    case = Case(MOE_OUTPUT, tokens=5, top_k=top_k, layout="route_major", local=0.5)
    x = unfinalized(case.arguments())
    assert x.route_major
    assert x.gemm2_permuted.shape == (5 * top_k, 256)
    index = x.expanded_idx_to_permuted_idx.flatten()
    assert bool(((index == -1) | (index == torch.arange(5 * top_k))).all())
    assert bool((index == -1).any())
    assert bool((index >= 0).any())


@given(case_strategy(FINALIZE, max_hidden=256))
@QUIET
def test_capacity_slots_are_poison(case: Case) -> None:
    arguments = case.arguments()
    live = case.tokens
    assert arguments["expert_outputs"].shape == (live + case.capacity, case.top_k, case.hidden)
    assert is_poison(arguments["expert_outputs"][live:], case.poison)
    assert is_poison(arguments["expert_weights"][live:], case.poison)
    assert is_poison(arguments["output"], case.poison)
    checks.check(FINALIZE, arguments)


@given(case_strategy(FUSED, max_hidden=256))
@QUIET
def test_the_fused_operation_gets_the_identity_map(case: Case) -> None:
    arguments = case.arguments()
    checks.check(FUSED, arguments)
    checks.check_values(FUSED, arguments)


@given(case_strategy("beam_norm_residual_norm", max_hidden=256))
@QUIET
def test_the_boundary_gets_what_it_takes(case: Case) -> None:
    checks.check(case.operation, case.arguments())


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("tokens", [0, 1, 5, 8, 9])
@pytest.mark.parametrize("poison", POISONS)
def test_a_gather_gives_each_token_to_one_rank(ranks: int, tokens: int, poison: str) -> None:
    case = Case(GATHER, tokens=tokens, ranks=ranks, capacity=1, poison=poison)
    whole = problem_of(case)
    slots = -(-tokens // ranks)
    seen = []
    for rank in range(ranks):
        x = unfinalized(case.arguments(rank))
        index = x.expanded_idx_to_permuted_idx
        assert index.flatten().tolist() == list(range((slots + 1) * case.top_k))
        owned = max(0, min(slots, tokens - rank * slots))
        rows = x.gemm2_permuted.view(slots + 1, case.top_k, case.hidden)
        assert is_poison(rows[owned:], poison)
        assert is_poison(x.expert_weights[owned:], poison)
        seen.append(rows[:owned])
    assert torch.equal(torch.cat(seen), whole.rows)


def test_a_gather_has_the_same_tokens_for_any_rank_count() -> None:
    one = problem_of(Case(GATHER, tokens=7))
    three = problem_of(Case(GATHER, tokens=7, ranks=3))
    assert torch.equal(one.rows, three.rows)
    assert torch.equal(one.residual, three.residual)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("source", ["normal", "moe", "ties", "allreduce", "routes"])
@pytest.mark.parametrize("local", [1.0, 0.5])
def test_ranks_partition_the_routes(ranks: int, source: str, local: float) -> None:
    if ranks == 1 and (source == "allreduce" or (source == "routes" and local == 1.0)):
        return
    case = Case(ALLREDUCE, source, 1, 6, 4, 256, ranks=ranks, local=local)
    held = torch.zeros((6, 4), dtype=torch.int64)
    owner_of: dict[int, int] = {}
    routing = problem_of(case).routing
    for rank in range(ranks):
        mine = unfinalized(case.arguments(rank)).expanded_idx_to_permuted_idx >= 0
        held += mine.long()
        for expert in routing.ids[mine].tolist():
            assert owner_of.setdefault(expert, rank) == rank
    assert torch.equal(held, (routing.owners != REMOTE).long())
    if local == 1.0:
        assert bool((held == 1).all())
    assert all(len(set(ids)) == 4 for ids in routing.ids.tolist())


def test_an_expert_map_agrees_with_the_rows() -> None:
    case = Case("route_major_moe_output", tokens=6, top_k=4, local=0.5)
    arguments = case.arguments()
    local = arguments["expert_map"][arguments["topk_ids"].long()] >= 0
    assert bool((~local).any())
    assert is_poison(arguments["routes"][~local], "nan")
    assert bool(arguments["routes"][local].isfinite().all())
    held = arguments["expert_map"][arguments["expert_map"] >= 0]
    assert sorted(held.tolist()) == list(range(len(held)))
    assert set(arguments["expert_map"].tolist()) >= {-1, -2, -3} or case.experts < 12


def test_convert_gets_both_shapes() -> None:
    case = Case("convert_flashinfer_moe_output", tokens=3, top_k=2)
    gemm2, weights, index = case.arguments()["flashinfer_output"]
    assert gemm2.dim() == 2
    assert weights.shape == index.shape == (3, 2)
    _, weights, index = case.replace(flat=True).arguments()["flashinfer_output"]
    assert weights.shape == index.shape == (6,)
    finalized = case.replace(routed="finalized", aliased=True)
    arguments = finalized.arguments()
    assert arguments["finalized_output"] is arguments["flashinfer_output"][0]
    bare = finalized.replace(flat=True).arguments()
    assert bare["finalized_output"] is bare["flashinfer_output"]


def test_dead_weights_are_only_in_dead_slots() -> None:
    case = Case(MOE_OUTPUT, "routes", 1, 9, 4, 256, local=0.5)
    x = unfinalized(case.arguments())
    live = x.expanded_idx_to_permuted_idx >= 0
    assert bool(x.expert_weights[live].isfinite().all())
    assert bool(x.expert_weights[~live].isnan().any())
    assert bool((~live).all(1).any()), "no token without a local route"
    rows = x.gemm2_permuted
    for row in (rows[0], rows[-1]):
        assert bool(row[row.isfinite()].abs().min() >= 1024.0)


@pytest.mark.parametrize("operation", list(CALLED))
def test_optional_arguments_follow_their_options(operation: str) -> None:
    case = Case(operation, top_k=1)
    names = set(case.arguments())
    assert "workspace" not in names
    if "post_eps" in names:
        assert case.arguments()["post_weight"] is None
        assert case.arguments()["post_eps"] is None
        given_norm = case.replace(post="affine", post_eps=1e-5).arguments()
        assert given_norm["post_eps"] == 1e-5
        assert given_norm["post_weight"].dtype == torch.bfloat16
        assert case.replace(post="norm").arguments()["post_weight"] is None
