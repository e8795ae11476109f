"""The suite's main job: a file that breaks a rule is told which.

The files are written as a kernel author might bring them, away from the reference's stages where
that is possible, so that the suite is not tried on its own catalogue alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moetail.conformance.run.check import Check, planned
from moetail.conformance.run.options import make_plan
from moetail.conformance.run.plan import Plan
from moetail.conformance.run.ranks import RankPool
from moetail.conformance.run.results import CONFORMS, NOT_JUDGED, NOT_PROVIDED, VIOLATES, Results
from moetail.conformance.run.runner import run_trial
from moetail.conformance.run.subject import Subject
from moetail.conformance.run.trial import Trial
from moetail.conformance.suite import checks, run_suite
from moetail.spec.rules import ALLREDUCE, FINALIZE, GATHER, MOE_OUTPUT, OPERATIONS

_FINALIZE = """
import torch


def beam_moe_finalize(
    expert_outputs, expert_weights, output, routed_scale=1.0, post_weight=None, post_eps=None
):
    capacity, top_k, hidden = expert_outputs.shape
    live = output.shape[0]
    assert 1 <= top_k <= 32 and 256 <= hidden <= 8192 and hidden % 256 == 0 and live <= capacity
    assert expert_outputs.dtype == output.dtype == torch.bfloat16
    assert expert_outputs.is_contiguous() and output.is_contiguous()
    assert output.shape[1] == hidden and expert_weights.dtype == torch.float32
    assert expert_weights.is_contiguous() and expert_weights.shape[1] == top_k
    assert expert_weights.shape[0] >= live and expert_weights.device == output.device
    if post_weight is not None:
        assert post_eps is not None and post_weight.dtype == torch.bfloat16
        assert post_weight.shape == (hidden,)
    sums = torch.zeros(live, hidden)
    for k in range(top_k):
        sums += expert_weights[:live, k, None] * expert_outputs[:live, k].float()
    scaled = SCALED
    if post_eps is not None:
        wide = scaled.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + post_eps)
        if post_weight is not None:
            wide = AFFINE
        scaled = wide.bfloat16()
    WRITE
    return output
"""

_LEGAL = {
    "SCALED": "(sums.bfloat16().float() * torch.tensor(routed_scale)).bfloat16()",
    "AFFINE": "wide * post_weight.float()",
    "WRITE": "output.copy_(scaled)",
}


def finalize(**changes: str) -> str:
    """The source of a file that provides ``beam_moe_finalize`` alone; legal without changes."""
    source = _FINALIZE
    for name, text in {**_LEGAL, **changes}.items():
        source = source.replace(name, text)
    return source


MINUS_ONE_AS_ROW_ZERO = """
from moetail.reference import Reference


class RowZero(Reference):
    def weighted_sum(self, step, rows, weights, index):
        index = index.clamp(min=0) if rows.shape[0] else index
        return super().weighted_sum(step, rows, weights, index)


finalize_moe_output = RowZero().finalize_moe_output
"""

PADDING_GATHERED = """
from moetail.reference import Reference


class Padding(Reference):
    def finalize_owned(self, values, slots, live):
        return self.finalize(values, slots, ("reduce", "round", "scale"))

    def gather(self, workspace, rows, num_tokens, *, through_hook=False):
        slots = workspace.world_size * rows.shape[0]
        return super().gather(workspace, rows, slots, through_hook=through_hook)[-num_tokens:]


beam_moe_finalize_gather_norm_residual_norm = Padding().beam_moe_finalize_gather_norm_residual_norm
"""

ONE_RANK = """
import os
import time

from moetail.reference import Reference


class OneRank(Reference):
    def gather(self, workspace, rows, num_tokens, *, through_hook=False):
        if workspace.rank == workspace.world_size - 1 and workspace.world_size > 1:
            DO
        return super().gather(workspace, rows, num_tokens, through_hook=through_hook)


beam_moe_finalize_gather_norm_residual_norm = OneRank().beam_moe_finalize_gather_norm_residual_norm
"""


def write(folder: Path, source: str, name: str = "my_kernel.py") -> str:
    """The source as a file in a folder; its path as the command line takes it."""
    path = folder / name
    path.write_text(source, encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(3, timeout=20.0, grace=1.0) as made:
        yield made


def judged(tmp_path: Path, source: str, pool: RankPool, **restrict: tuple[str, ...]) -> Results:
    plan = make_plan(ranks="1,2,3")
    return run_suite(write(tmp_path, source), plan, pool=pool, **restrict)  # type: ignore[arg-type]


def check_named(name: str) -> Check:
    (check,) = (check for check in checks() if check.name == name)
    return check


@pytest.mark.parametrize(
    ("written", "status"),
    [("output.copy_(scaled)", CONFORMS), ("output[:256].copy_(scaled[:256])", VIOLATES)],
)
def test_what_only_long_batches_show(tmp_path: Path, written: str, status: str) -> None:
    """A GPU tries the longest ones too, which other sizes of blocks are for."""
    check = check_named("test_tail_on_long_batches")
    plan = Plan(profile="full")
    ((_, trial),) = planned([check], plan, [FINALIZE])
    assert len(list(planned([check], Plan(profile="full", device="cuda"), [FINALIZE]))) > 1
    subject = Subject.of(write(tmp_path, finalize(WRITE=written)), plan)
    result, _ = run_trial(check, subject, trial)
    assert result.status == status, result.found


@pytest.mark.parametrize(
    ("name", "ranks"), [(MOE_OUTPUT, 1), *((ALLREDUCE, ranks) for ranks in (1, 2, 3, 4, 8))]
)
def test_a_check_of_tokens_with_local_routes_finds_some(name: str, ranks: int) -> None:
    """On every rank, or it judges nothing: with as many ranks as routes no token has them."""
    check = check_named("test_route_1_remote_routes_contribute_nothing_to_others")
    made = list(planned([check], Plan(profile="full", ranks=(ranks,)), [name]))
    assert made
    for _, trial in made:
        case = trial.case
        calls = [case.arguments(rank) for rank in range(case.ranks)]
        local = torch.stack([call["x"].routed.expanded_idx_to_permuted_idx >= 0 for call in calls])
        there = local.any(dim=2).all(dim=0)
        assert there.any(), case.id
        assert not local[:, there].all(), case.id


def test_a_legal_file_conforms_and_the_rest_is_not_provided(tmp_path: Path, pool: RankPool) -> None:
    results = judged(tmp_path, finalize(), pool)
    assert results.verdict == CONFORMS, results.violations
    assert results.exit_code == 0
    assert results.judged > 10_000
    matrix = results.matrix()
    for row in matrix.values():
        for name, cell in row.items():
            assert cell.status == NOT_PROVIDED if name != FINALIZE else cell.trials >= 0
    # What this machine can not decide is said, and nothing else is left out.
    undecided = {rule for rule, row in matrix.items() if row.get(FINALIZE, None)}
    undecided = {rule for rule in undecided if matrix[rule][FINALIZE].status == NOT_JUDGED}
    assert undecided <= {"RUN-6"}


_RAISES_FAR = """
from moetail.reference import Reference


def finalize_moe_output(x):
    rows = getattr(x.routed, "gemm2_permuted", None)
    if rows is not None and rows.numel() > 2**31:
        raise RuntimeError({message!r})
    return Reference().finalize_moe_output(x)
"""


@pytest.mark.parametrize(
    ("message", "verdict"),
    [
        ("CUDA error: an illegal memory access was encountered", VIOLATES),
        ("CUDA out of memory. Tried to allocate 4.00 GiB", NOT_JUDGED),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate", NOT_JUDGED),
    ],
)
def test_only_a_lack_of_memory_excuses_a_refusal_of_large_buffers(
    tmp_path: Path, pool: RankPool, message: str, verdict: str
) -> None:
    source = _RAISES_FAR.format(message=message)
    results = judged(tmp_path, source, pool, rules=("RUN-6",))
    assert results.verdict == verdict, results.violations


@pytest.mark.parametrize(
    ("rule", "operation", "source"),
    [
        ("ROUND-2", FINALIZE, finalize(SCALED="(sums * torch.tensor(routed_scale)).bfloat16()")),
        ("ROUND-2", FINALIZE, finalize(SCALED="sums.bfloat16() * routed_scale ** 2")),
        ("ROUND-4", FINALIZE, finalize(AFFINE="wide.bfloat16().float() * post_weight.float()")),
        ("RUN-3", FINALIZE, finalize(WRITE="output[: live - 1].copy_(scaled[: live - 1])")),
        ("RUN-3", FINALIZE, finalize(WRITE="output = scaled")),
        ("ROUTE-1", MOE_OUTPUT, MINUS_ONE_AS_ROW_ZERO),
        ("OWN-2", GATHER, PADDING_GATHERED),
    ],
)
def test_the_first_rule_named_is_the_broken_one(
    tmp_path: Path, pool: RankPool, rule: str, operation: str, source: str
) -> None:
    results = judged(tmp_path, source, pool)
    assert results.verdict == VIOLATES
    assert results.exit_code == 1
    first = results.violations[0]
    assert (first.rule, first.operation) == (rule, operation)
    assert first.found
    assert first.repeat.startswith("moetail check ")
    statuses = {cell.status for row in results.matrix().values() for cell in row.values()}
    assert NOT_PROVIDED in statuses


def test_the_repeat_command_repeats_the_violation(tmp_path: Path, pool: RankPool) -> None:
    source = finalize(SCALED="(sums * torch.tensor(routed_scale)).bfloat16()")
    path = write(tmp_path, source)
    (first, *_) = run_suite(path, make_plan(), pool=pool, rules=("ROUND-2",)).violations
    plan = make_plan()

    subject = Subject.of(path, plan, pool)
    results = [
        run_trial(check, subject, trial)[0]
        for check, trial in planned(
            checks(), plan, (FINALIZE,), rules=("ROUND-2",), case=Trial.parse(first.case)
        )
    ]
    assert [result.found for result in results] == [first.found]


def test_a_file_without_operations_judges_nothing(tmp_path: Path, pool: RankPool) -> None:
    results = judged(tmp_path, "answer = 42\n", pool)
    assert (results.verdict, results.exit_code) == (NOT_JUDGED, 3)
    assert all(
        cell.status == NOT_PROVIDED for row in results.matrix().values() for cell in row.values()
    )
    assert {item.name for item in OPERATIONS}.isdisjoint(results.provided)


def _alive(pids: tuple[int, ...]) -> list[int]:
    alive = []
    for pid in pids:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            continue
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[-1].split()[0]
        if state != "Z":
            alive.append(pid)
    return alive


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("raise RuntimeError('the peer is gone')", "the peer is gone"),
        ("time.sleep(600)", "did not arrive"),
        ("os._exit(7)", "died"),
    ],
)
def test_one_rank_that_fails_ends_the_check(tmp_path: Path, what: str, said: str) -> None:
    path = write(tmp_path, ONE_RANK.replace("DO", what))
    plan = Plan(ranks=(2,), timeout=5.0)
    started = time.monotonic()
    with RankPool(2, timeout=5.0, grace=1.0) as pool:
        results = run_suite(path, plan, pool=pool, rules=("OWN-1", "OWN-3"))
        pids = pool.pids
    assert time.monotonic() - started < 60.0
    violations = [trial for trial in results.trials if trial.status == VIOLATES]
    # The others would wait as long: they are not tried again, and are not green either.
    assert len(violations) == 1
    assert all(trial.status == NOT_JUDGED for trial in results.trials if trial not in violations)
    assert said in violations[0].found
    assert "rank 1" in violations[0].found
    assert GATHER in violations[0].found
    assert results.exit_code == 1
    assert _alive(pids) == []
