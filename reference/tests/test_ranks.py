"""Operations 6, 7 and 8's distributed half, between real processes over gloo.

The processes run once for each world size; the tests then read what the ranks saw.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

WORLD_SIZES = (1, 2, 3, 4, 5, 8)


@pytest.fixture(scope="module")
def script(load_module):
    return load_module("ranks")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(Path(__file__).with_name("ranks.py")), str(folder)]
    finished = subprocess.run(
        [*command, *map(str, WORLD_SIZES)], capture_output=True, text=True, timeout=300, check=False
    )
    assert finished.returncode == 0, finished.stderr
    # A warning that every rank of every user would print is a fault of ours.
    assert "Warning" not in finished.stderr
    return folder


@pytest.fixture(scope="module", params=WORLD_SIZES, ids="W={}".format)
def ranks(request, folder) -> list[dict[Any, Any]]:
    """What each rank saw, by (test, case...)."""
    return [
        torch.load(folder / f"{request.param}-{rank}.pt", weights_only=False)
        for rank in range(request.param)
    ]


def identity(num_tokens: int, top_k: int) -> torch.Tensor:
    return torch.arange(num_tokens * top_k, dtype=torch.int32).view(num_tokens, top_k)


def bits_of(oracle, output) -> list[bytes | None]:
    return [None if tensor is None else oracle.raw(tensor) for tensor in output]


@pytest.mark.parametrize("tail", ["bare", "full"])
@pytest.mark.parametrize("strategy", ["oneshot", "twoshot", "unfused"])
def test_gather_is_the_whole_computed_at_once(oracle, script, ranks, tail, strategy):
    for num_tokens in script.token_counts(len(ranks)):
        rows, weights = script.routed(num_tokens)
        finalized = oracle.finalize(
            rows.view(-1, script.HIDDEN), weights, identity(num_tokens, script.TOP_K), script.SCALE
        )
        residual, arguments = script.residual_of(num_tokens), script.tail_of(tail)
        for seen in ranks:
            result = seen["gather", num_tokens, tail, strategy]
            oracle.assert_boundary(finalized, residual, *arguments, result)
            if tail == "bare":
                assert oracle.same_bits(result[0], oracle.plus(finalized, residual))


@pytest.mark.parametrize("tail", ["bare", "full"])
def test_all_ranks_and_strategies_give_the_same_bits(oracle, script, ranks, tail):
    """Between ranks the contract asks for it; between strategies the reference promises it."""
    for num_tokens in script.token_counts(len(ranks)):
        first = bits_of(oracle, ranks[0]["gather", num_tokens, tail, "oneshot"])
        for seen in ranks:
            for strategy in script.STRATEGIES:
                assert bits_of(oracle, seen["gather", num_tokens, tail, strategy]) == first


@pytest.mark.parametrize("tail", ["bare", "full"])
def test_all_reduce(oracle, script, ranks, tail):
    """p = RN(s + shared) on each rank, q = RN(sum of p), then the boundary."""
    world_size = len(ranks)
    for num_tokens in script.token_counts(world_size):
        total = torch.zeros(num_tokens, script.HIDDEN, dtype=torch.float64)
        for rank in range(world_size):
            part = script.expert_part(num_tokens, rank, world_size)
            scaled = oracle.finalize(
                part.routed.gemm2_permuted,
                part.routed.expert_weights,
                part.routed.expanded_idx_to_permuted_idx,
                part.routed_scaling_factor,
            )
            total += oracle.plus(scaled, part.shared_output).to(torch.float64)
        reduced = oracle.round_exact(total)
        residual, arguments = script.residual_of(num_tokens), script.tail_of(tail)
        first = ranks[0]["all-reduce", num_tokens, tail]
        oracle.assert_boundary(reduced, residual, *arguments, first)
        for seen in ranks:
            result = seen["all-reduce", num_tokens, tail]
            assert bits_of(oracle, result) == bits_of(oracle, first)


def test_only_unfused_calls_the_hook_and_as_torch_spells_it(ranks):
    """(output, input, group=the workspace's group), once."""
    for seen in ranks:
        for strategy in ("oneshot", "twoshot"):
            assert seen["hook", strategy][0] == []
        assert seen["hook", "unfused"][0] == [(2, ("group",), True)]


def test_no_strategy_means_what_the_thresholds_say(oracle, ranks):
    num_tokens = len(ranks) + 1
    expected = {
        (num_tokens, None): "oneshot",
        (num_tokens - 1, None): "twoshot",
        (num_tokens - 1, num_tokens): "unfused",
        (0, num_tokens + 1): "twoshot",
        (num_tokens, num_tokens): "oneshot",
        (0, 0): "unfused",
    }
    for seen in ranks:
        for thresholds, strategy in expected.items():
            calls, chosen, output = seen["hook", thresholds]
            assert chosen == [strategy]
            assert len(calls) == (strategy == "unfused")
            assert bits_of(oracle, output) == bits_of(oracle, seen["hook", "oneshot"][2])


def test_fields_of_a_new_workspace(script, ranks):
    for rank, seen in enumerate(ranks):
        fields = dict(seen["fields",])
        oneshot = fields.pop("moe_gather_oneshot_max_tokens")
        assert isinstance(oneshot, int)
        assert fields == {
            "world_size": len(ranks),
            "rank": rank,
            "hidden_size": script.HIDDEN,
            "max_tokens": script.MAX_TOKENS,
            "device_group": True,
            "all_gather": None,
            "moe_gather_separate_norm_min_tokens": None,
        }


def test_create_answers_the_same_on_every_rank(ranks):
    world_size = len(ranks)
    for seen in ranks:
        assert seen["create", "half"] is None
        assert seen["create", "single"] is None
        assert seen["create", "no tokens"] == "made"
        assert seen["create", "default group"] == "made"
        assert seen["create", "all are impossible"] == "DOMAIN-1 max_tokens: -1"
        if world_size > 1:
            for name in ("hidden differs", "tokens differ", "dtype differs", "last is impossible"):
                answer = seen["create", name]
                assert answer.startswith("DOMAIN-1 hidden_size, max_tokens, dtype: ")
                assert answer == ranks[0]["create", name]
            assert seen["create", "outsider"]
    if world_size > 1:
        assert ranks[0]["create", "pair"] == (2, 0, True)
        assert ranks[-1]["create", "pair"] == (2, 1, True)


def test_refusals_come_on_every_rank(script, ranks):
    too_many = f"DOMAIN-1 residual: {script.MAX_TOKENS + 1} tokens"
    for seen in ranks:
        assert seen["refuse", "strategy"] == "DOMAIN-1 strategy: 'fused'"
        assert seen["refuse", "strategy, no tokens"] == "DOMAIN-1 strategy: 'fused'"
        assert seen["refuse", "max_tokens"] == too_many
        assert seen["refuse", "all-reduce max_tokens"] == too_many
        assert seen["refuse", "slots"] == "DOMAIN-1 x.gemm2_permuted: 1 token slots"


def test_without_a_process_group_there_is_no_workspace():
    from moetail import reference
    from moetail.spec import ContractError

    create = reference.BeamAllReduceWorkspace.create
    assert create(None, 256, 8, torch.bfloat16) is None
    with pytest.raises(ContractError, match="hidden_size"):
        create(None, 0, 8, torch.bfloat16)
