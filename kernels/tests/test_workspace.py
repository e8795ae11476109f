"""Workspaces over process groups: agreement, refusals, the reference behind them on CPU tensors;
where there are two GPUs, two real ranks, and one that is lost."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import moetail.kernels as kernels
from moetail.conformance.cases import Case
from moetail.conformance.judge import judge
from moetail.conformance.run.ranks import RankPool
from moetail.kernels import BeamAllReduceWorkspace, ExchangeError
from moetail.kernels.workspace import MAX_RANKS, _shown
from moetail.spec import ContractError

GATHER = "beam_moe_finalize_gather_norm_residual_norm"
ALLREDUCE = "beam_finalize_allreduce_norm_residual_norm"
TAIL: dict[str, Any] = {"post": "affine", "next": "affine", "scales": (0.75, 1.25)}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(3) as pool:
        yield pool


@pytest.fixture(scope="module")
def gpus() -> Iterator[RankPool]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with RankPool(2, device="cuda", timeout=120.0) as pool:
        yield pool


def created(group: Any, rank: int, hidden: int, tokens: list[int], dtype: Any) -> Any:
    made = BeamAllReduceWorkspace.create(group, hidden, tokens[rank], dtype)
    if made is None:
        return BeamAllReduceWorkspace.why_unsupported()
    return made.world_size, made.rank, made.hidden_size, made.max_tokens, made.buffers is None


def operate(group: Any, rank: int, case: Case, device: str) -> Any:
    made = BeamAllReduceWorkspace.create(group, case.hidden, case.tokens, torch.bfloat16)
    assert made is not None
    arguments = case.arguments(rank, f"cuda:{rank}" if device == "cuda" else "cpu")
    return getattr(kernels, case.operation)(**arguments, workspace=made)


def values(outcomes: list[Any]) -> list[Any]:
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
    return [outcome.value for outcome in outcomes]


def test_fields(pool: RankPool) -> None:
    found = values(pool.run(3, created, 256, [5] * 3, torch.bfloat16, operation="create"))
    assert found == [(3, rank, 256, 5, True) for rank in range(3)]


def test_why_a_dtype_is_not_supported(pool: RankPool) -> None:
    found = values(pool.run(2, created, 256, [5] * 2, torch.float16, operation="create"))
    assert found == ["torch.float16; supported: torch.bfloat16"] * 2


def test_ranks_that_ask_for_different_sizes_are_all_refused(pool: RankPool) -> None:
    for outcome in pool.run(2, created, 256, [5, 6], torch.bfloat16, operation="create"):
        assert outcome.error is not None
        assert "[DOMAIN-1]" in outcome.error.message


def test_no_group() -> None:
    assert BeamAllReduceWorkspace.create(None, 256, 4, torch.bfloat16) is None
    assert "no process group" in str(BeamAllReduceWorkspace.why_unsupported())
    with pytest.raises(ContractError):
        BeamAllReduceWorkspace.create(None, 0, 4, torch.bfloat16)


@pytest.mark.parametrize("operation", [GATHER, ALLREDUCE])
def test_cpu_tensors_run_the_reference(pool: RankPool, operation: str) -> None:
    case = Case(operation, tokens=5, ranks=3, **TAIL)
    results = values(pool.run(3, operate, case, "cpu", operation=operation))
    verdict = judge(operation, [case.arguments(rank) for rank in range(3)], results)
    assert verdict.conforms, verdict.describe()


def test_a_signature_in_words() -> None:
    assert _shown(1 << 30 | 1 << 29 | 7) == "twoshot gather of 7 tokens with the next norm"
    assert _shown(2 << 30 | 9) == "all-reduce of 9 tokens"


# --- two GPUs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 9, 600, 1100])
@pytest.mark.parametrize("call", ["oneshot", "twoshot", "unfused", ALLREDUCE, "other width"])
def test_two_real_ranks(gpus: RankPool, call: str, tokens: int) -> None:
    hidden = 513 if call == "other width" else 7168
    call = ALLREDUCE if call == "other width" else call
    strategy = {} if call == ALLREDUCE else {"strategy": call}
    operation = ALLREDUCE if call == ALLREDUCE else GATHER
    case = Case(operation, tokens=tokens, top_k=8, hidden=hidden, ranks=2, **TAIL, **strategy)
    results = values(gpus.run(2, operate, case, "cuda", operation=call))
    verdict = judge(operation, [case.arguments(rank) for rank in range(2)], results)
    assert verdict.conforms, verdict.describe()
    for mine, other in zip(*results, strict=True):
        assert torch.equal(mine.view(torch.int16), other.view(torch.int16))


def test_why_gpus_are_refused(gpus: RankPool) -> None:
    found = values(gpus.run(2, created, 256, [5, 5], torch.float16, operation="create"))
    assert found == ["torch.float16; supported: torch.bfloat16"] * 2


def lose(group: Any, rank: int, tokens: list[int], again: bool) -> Any:
    """A first call together; in the second one rank has another T, or is not there (T < 0)."""
    made = BeamAllReduceWorkspace.create(group, 256, 64, torch.bfloat16)
    assert made is not None
    made.deadline_s = 0.5
    device = f"cuda:{rank}"
    for size in (8, tokens[rank]):
        if size >= 0:
            case = Case(GATHER, tokens=size, ranks=2, strategy="oneshot")
            kernels.beam_moe_finalize_gather_norm_residual_norm(
                **case.arguments(rank, device), workspace=made
            )
            torch.cuda.synchronize()
    try:
        if again:
            case = Case(GATHER, tokens=8, ranks=2, strategy="oneshot")
            kernels.beam_moe_finalize_gather_norm_residual_norm(
                **case.arguments(rank, device), workspace=made
            )
        made.check()
    except ExchangeError as error:
        return str(error)
    return None


@pytest.mark.parametrize("again", [False, True])
def test_a_lost_rank_is_an_error_on_the_other(gpus: RankPool, again: bool) -> None:
    first, _ = values(gpus.run(2, lose, [8, -1], again, operation="lose"))
    assert first is not None
    assert "rank 1 did not arrive within the deadline" in first


def test_another_number_of_tokens_is_an_error_on_both(gpus: RankPool) -> None:
    first, second = values(gpus.run(2, lose, [8, 10], False, operation="lose"))
    assert "rank 1 called oneshot gather of 10 tokens" in first
    assert "rank 0 called oneshot gather of 8 tokens" in second


# --- soak -----------------------------------------------------------------------------------------

SOAK_CALLS = int(os.environ.get("MOETAIL_SOAK", "4000"))
SOAK_MINUTES = float(os.environ.get("MOETAIL_SOAK_MINUTES", "0"))


def soak_cases(ranks: int, rng: random.Random) -> list[Case]:
    found = []
    for index in range(48):
        call = ("oneshot", "twoshot", "unfused", ALLREDUCE)[index % 4]
        tokens = (0, 1, 2, rng.randint(3, 30), rng.randint(31, 150), rng.randint(151, 700))
        options: dict[str, Any] = {
            "tokens": tokens[index // 4 % 6],
            "ranks": ranks,
            "hidden": 1024,
            "top_k": rng.choice([1, 2, 8, 10]),
            "post": rng.choice(["none", "norm", "affine"]),
            "next": rng.choice(["none", "norm", "affine"]),
            "scales": rng.choice([None, (0.5, 1.25)]),
            "source": rng.choice(["normal", "zeros", "nan", "huge"]),
            "routed_scale": rng.choice([1.0, -2.5]),
            "seed": index,
        }
        if call == ALLREDUCE:
            options |= {"shared": rng.random() < 0.5, "weights": rng.choice(["fp32", "bf16"])}
            found.append(Case(ALLREDUCE, **options))
        else:
            found.append(Case(GATHER, strategy=call, **options))
    # So many tokens of such rows that two ranks divide their blocks.
    for strategy, top_k in (("oneshot", 2), ("oneshot", 8), ("twoshot", 8)):
        tail = {"post": "affine", "next": "affine", "tokens": 970 + top_k, "hidden": 4608}
        found.append(Case(GATHER, strategy=strategy, ranks=ranks, top_k=top_k, **tail))
    return found


def soak(group: Any, rank: int, calls: int, minutes: float) -> tuple[int, int, list[str]]:
    """Random calls, eager and in graphs, each compared with a judged result of the same arguments.

    At least so many calls, for at least so long. Returns the calls made, elements that differed,
    and what the judge said against the first ones.
    """
    ranks, rng = group.size(), random.Random(7)
    device = f"cuda:{rank}"
    cases = soak_cases(ranks, rng)
    arguments = [case.arguments(rank, device) for case in cases]
    workspaces = {}
    for hidden, tokens in ((1024, 700), (4608, 1000)):
        made = BeamAllReduceWorkspace.create(group, hidden, tokens, torch.bfloat16)
        assert made is not None
        workspaces[hidden] = made

    def call(index: int) -> list[torch.Tensor]:
        case = cases[index]
        function = getattr(kernels, case.operation)
        result = function(**arguments[index], workspace=workspaces[case.hidden])
        return [tensor.view(torch.int16) for tensor in result if tensor is not None]

    expected, faults = [], []
    for index, case in enumerate(cases):
        bits = call(index)
        expected.append(bits)
        values = [tensor.view(torch.bfloat16) for tensor in bits]
        pair = (values[0], values[1] if len(values) > 1 else None)
        everybody = [case.arguments(other, device) for other in range(ranks)]
        verdict = judge(case.operation, everybody, [pair] * ranks)
        if not verdict.conforms:
            faults.append(f"{case.id}: {verdict.describe()}")
        sums: list[Any] = [None] * ranks
        mine = [int(tensor.long().sum()) for tensor in bits]
        torch.distributed.all_gather_object(sums, mine, group=group)
        if any(other != mine for other in sums):
            faults.append(f"{case.id}: replicas differ")
    different = torch.zeros((), dtype=torch.int64, device=device)

    def compare(index: int, bits: list[torch.Tensor]) -> None:
        for found, wanted in zip(bits, expected[index], strict=True):
            different.add_((found != wanted).sum())

    graphs = []
    for _ in range(4):
        picked = [rng.randrange(len(cases)) for _ in range(50)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = [call(index) for index in picked]
        graphs.append((graph, picked, outputs))
    done, end = 0, time.monotonic() + 60 * minutes
    while done < calls or _anybody(group, time.monotonic() < end):
        for _ in range(rng.randint(1, 40)):
            index = rng.randrange(len(cases))
            compare(index, call(index))
            done += 1
        graph, picked, outputs = rng.choice(graphs)
        for _ in range(rng.randint(1, 3)):
            graph.replay()
            done += len(picked)
        for index, bits in zip(picked, outputs, strict=True):
            compare(index, bits)
    for made in workspaces.values():
        made.check()
    return done, int(different), faults


def _anybody(group: Any, wish: bool) -> bool:
    """Whether some rank wishes it: clocks differ, and all ranks must make the same calls."""
    wishes: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(wishes, wish, group=group)
    return any(wishes)


def test_soak() -> None:
    """On all GPUs; MOETAIL_SOAK says how many calls, MOETAIL_SOAK_MINUTES for how long."""
    ranks = min(torch.cuda.device_count(), MAX_RANKS)
    if ranks < 2:
        pytest.skip("needs two GPUs")
    limit = 500.0 + 60 * SOAK_MINUTES
    with RankPool(ranks, device="cuda", timeout=limit) as pool:
        outcomes = pool.run(ranks, soak, SOAK_CALLS, SOAK_MINUTES, operation="soak")
    for done, different, faults in values(outcomes):
        print(f"\n{done} calls on each of {ranks} ranks, {different} elements differ")
        assert not faults, "\n".join(faults)
        assert done >= SOAK_CALLS
        assert different == 0
