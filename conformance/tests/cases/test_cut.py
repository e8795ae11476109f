"""A call cut to some tokens: its results are the whole call's for these tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from moetail.conformance.cases import Case
from moetail.conformance.cases.cut import choose, cut_call, cut_result, tokens_of
from moetail.conformance.cases.tensors import tensors_in
from moetail.conformance.diagnosis import simulate
from moetail.conformance.run.call import same_bits
from moetail.reference import Reference
from moetail.spec.rules import BOUNDARY, CONVERT, FINALIZE, FUSED, GATHER, MOE_OUTPUT

CASES = [
    Case(BOUNDARY, tokens=5, top_k=1, post="affine", next="affine", scales=(0.5, 2.0)),
    Case(FINALIZE, tokens=5, top_k=3, capacity=2, post="affine"),
    Case(FUSED, tokens=5, top_k=3, capacity=2, next="affine"),
    Case(MOE_OUTPUT, tokens=5, top_k=4, local=0.5, shared=True),
    Case(MOE_OUTPUT, tokens=5, top_k=4, local=0.5, layout="route_major"),
    Case(MOE_OUTPUT, tokens=5, top_k=4, local=0.5, layout="identity", capacity=2),
    Case(MOE_OUTPUT, tokens=5, routed="finalized", shared=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("tokens", [[3], [0, 4], [4, 1, 1, 99]])
def test_a_cut_call_gives_the_rows_of_the_whole_one(case: Case, tokens: list[int]) -> None:
    kept = choose(case.operation, tokens, case.tokens)
    assert kept == sorted({token for token in tokens if token < 5})
    function = getattr(Reference(), case.operation)
    whole = cut_result(function(**case.arguments()), case.tokens, kept)
    cut = cut_call(case.operation, case.arguments(), kept)
    assert tokens_of(case.operation, cut) == len(kept)
    for (_, left), (_, right) in zip(tensors_in(whole), tensors_in(function(**cut)), strict=True):
        assert left.shape[0] == len(kept)
        assert same_bits(left, right)


def test_rows_that_no_kept_route_refers_to_are_dropped() -> None:
    case = Case(MOE_OUTPUT, tokens=5, top_k=4, local=0.5)
    cut = cut_call(case.operation, case.arguments(), [1, 3])["x"].routed
    live = cut.expanded_idx_to_permuted_idx >= 0
    assert 0 < live.sum() < 8
    assert cut.gemm2_permuted.shape[0] == live.sum()


def test_a_conversions_call_stays_whole() -> None:
    call = Case(CONVERT).arguments()
    cut = cut_call(CONVERT, call, [1])
    assert tokens_of(CONVERT, call) == 0
    assert cut is not call
    assert all(cut[name] is value for name, value in call.items())


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("num_tokens", [1, 3, 5, 9])
@pytest.mark.parametrize("tokens", [[0], [2, 3], [0, 1, 8]])
def test_a_cut_gather_keeps_every_tokens_owner(
    ranks: int, num_tokens: int, tokens: list[int]
) -> None:
    kept = choose(GATHER, tokens, num_tokens, ranks)
    assert {token for token in tokens if token < num_tokens} <= set(kept)
    if not kept:
        return
    # The contract's own words: rank r owns [r * L, min((r + 1) * L, T)), L = ceil(T / W).
    before, after = math.ceil(num_tokens / ranks), math.ceil(len(kept) / ranks)
    assert [token // before for token in kept] == [place // after for place in range(len(kept))]

    one = Case(GATHER, tokens=num_tokens, ranks=ranks, top_k=2, hidden=256, next="affine")
    calls = [one.arguments(rank) for rank in range(ranks)]
    cut = [cut_call(GATHER, call, kept, rank, ranks) for rank, call in enumerate(calls)]
    whole = simulate(Reference, GATHER, calls)
    for rank, result in enumerate(simulate(Reference, GATHER, cut)):
        for left, right in zip(cut_result(whole[rank], num_tokens, kept), result, strict=True):
            assert same_bits(left, right)


@pytest.mark.parametrize(
    ("case", "role"),
    [(CASES[0], "residual"), (CASES[2], "rows"), (CASES[3], "shared_output")],
)
@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor[:-1],
        lambda tensor: torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]],
    ],
    ids=["shorter", "strided"],
)
def test_what_is_illegal_does_not_become_legal(
    case: Case, role: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    item, call = case.target.argument(role), case.arguments()
    illegal = item.put(call, change(item.of(call)))
    with pytest.raises(ValueError, match=item.name):
        getattr(Reference(), case.operation)(**illegal)
    with pytest.raises(ValueError, match=item.name):
        cut_call(case.operation, illegal, [1, 3])
