"""Virtual ranks: on the CPU they are threads, which an implementation of this file has meet."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from moetail.conformance.cases import Case
from moetail.conformance.implementation import UsageError, load
from moetail.conformance.run.call import CallSpec, same_bits
from moetail.conformance.run.options import make_plan
from moetail.conformance.run.ranks import RankError, RankPool
from moetail.conformance.run.results import CONFORMS, NOT_JUDGED, VIOLATES, Results
from moetail.conformance.run.subject import Subject
from moetail.conformance.run.trial import NotJudged, Trial
from moetail.conformance.run.virtual import execute_together
from moetail.conformance.run.workspaces import VIRTUAL_DEADLINE
from moetail.conformance.suite import run_suite
from moetail.spec.rules import ALLREDUCE, GATHER, WORKSPACE

THREADS = """
import threading
import time

from moetail.reference import Reference


class BeamAllReduceWorkspace:
    device_group = None
    moe_gather_oneshot_max_tokens = 64
    moe_gather_separate_norm_min_tokens = None
    deadline_s = 30.0
    made = []

    def __init__(self, world_size, rank, hidden_size, max_tokens, rows, barrier):
        self.world_size, self.rank = world_size, rank
        self.hidden_size, self.max_tokens = hidden_size, max_tokens
        self.rows, self.barrier = rows, barrier
        self.all_gather = HOOK

    @classmethod
    def create(cls, group, hidden_size, max_tokens, dtype):
        raise AssertionError("virtual ranks have no group")

    @classmethod
    def virtual(cls, world_size, hidden_size, max_tokens, device=None):
        if world_size > 4:
            raise ValueError("at most 4 ranks")
        cls.made.append((world_size, hidden_size, max_tokens))
        shared = [None] * world_size, threading.Barrier(world_size)
        return [
            cls(world_size, rank, hidden_size, max_tokens, *shared) for rank in range(world_size)
        ]

    def exchange(self, output, source, group=None):
        self.rows[self.rank] = source
        try:
            self.barrier.wait(DEADLINE)
        except threading.BrokenBarrierError:
            output.fill_(float("nan"))  # as a kernel that gives up
            return
        for rank, rows in enumerate(self.rows):
            output[rank * len(source) : (rank + 1) * len(source)] = rows
        self.barrier.wait(DEADLINE)

    def raise_if_lost(self):
        LOST


class Threads(Reference):
    def gather(self, workspace, rows, num_tokens, *, through_hook=False):
        gathered = rows.new_empty((workspace.world_size * len(rows), rows.shape[1]))
        last = workspace.world_size > 1 and workspace.rank == workspace.world_size - 1
        BEFORE
        collective = workspace.all_gather if through_hook else workspace.exchange
        collective(gathered, rows, group=workspace.device_group)
        AFTER
        return gathered[:num_tokens]


threads = Threads()
beam_moe_finalize_gather_norm_residual_norm = threads.beam_moe_finalize_gather_norm_residual_norm
beam_finalize_allreduce_norm_residual_norm = threads.beam_finalize_allreduce_norm_residual_norm
"""


def written(folder: Path, **changes: str) -> str:
    """The path of an implementation; legal without changes."""
    source = THREADS
    for name, text in {"HOOK": "self.exchange", "DEADLINE": "30.0", **changes}.items():
        source = source.replace(name, text)
    for name in ("LOST", "BEFORE", "AFTER"):
        source = source.replace(name, "pass")
    path = folder / "threads.py"
    path.write_text(source, encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """The process that holds the virtual ranks."""
    with RankPool(1, timeout=5.0) as made:
        yield made


def judged(path: str, pool: RankPool, *rules: str, ranks: str = "1,2,3") -> Results:
    plan = make_plan(ranks=ranks, virtual_ranks=True, implementation=load(path))
    return run_suite(path, plan, pool=pool, rules=rules)


def subject_of(path: str, pool: RankPool) -> Subject:
    return Subject.of(path, make_plan(ranks="2", virtual_ranks=True), pool)


def statuses(results: Results, name: str) -> dict[str, str]:
    return {rule: row[name].status for rule, row in results.matrix().items() if name in row}


def test_a_legal_implementation_conforms(tmp_path: Path, pool: RankPool) -> None:
    rules = [f"OWN-{number}" for number in (1, 2, 3, 4)] + ["LIVE-2", "DOMAIN-1"]
    rules += [f"RUN-{number}" for number in (1, 2, 3, 4, 5, 7)]
    results = judged(written(tmp_path), pool, *rules)
    assert results.verdict == CONFORMS, [trial.found for trial in results.violations]
    for name in (GATHER, ALLREDUCE):
        assert set(statuses(results, name).values()) == {CONFORMS}, name
    assert {Trial.parse(trial.case).case.ranks for trial in results.trials} == {1, 2, 3}
    # What needs a group is said to be undecided, and why.
    assert set(statuses(results, WORKSPACE).values()) == {NOT_JUDGED}
    said = {trial.found for trial in results.trials if trial.operation == WORKSPACE}
    assert said == {"create takes a process group, which virtual ranks do not have"}
    assert results.to_json()["plan"]["virtual_ranks"] is True


def test_who_has_no_virtual_ranks_is_told_what_is_allowed() -> None:
    assert "virtual_ranks" not in make_plan().shown
    with pytest.raises(UsageError, match=r"--virtual-ranks: reference has no .*; allowed: an impl"):
        make_plan(virtual_ranks=True, implementation=load("reference"))


@pytest.mark.parametrize(
    ("changes", "rule", "said"),
    [
        ({"AFTER": "gathered = gathered if last else gathered.flip(0)"}, "OWN-1", "wrong"),
        ({"AFTER": "gathered = gathered + last * 0.01"}, "OWN-3", "ranks 0 and 1 differ"),
        ({"BEFORE": "if last: raise OSError('gone')"}, "OWN-1", "rank 1: raised on legal"),
        ({"BEFORE": "if last: time.sleep(60)"}, "OWN-1", "the 2 virtual ranks did not finish"),
        ({"LOST": "raise OSError('lost')"}, "OWN-1", "rank 0: OSError: lost in beam_moe_fin"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, pool: RankPool, changes: dict[str, str], rule: str, said: str
) -> None:
    # Nobody who sleeps is waited for in vain: the pool's limit ends that call.
    deadline = "60" if "sleep" in str(changes) else "0.3"
    path = written(tmp_path, **changes, DEADLINE=deadline)
    results = judged(path, pool, rule, ranks="2")
    assert results.verdict == VIOLATES
    assert said in results.violations[0].found
    assert "--virtual-ranks" in results.violations[0].repeat.split()


def test_the_repeat_command_repeats(
    tmp_path: Path, pool: RankPool, capsys: pytest.CaptureFixture[str]
) -> None:
    from moetail.conformance.cli import main

    path = written(tmp_path, AFTER="gathered = gathered + last * 0.01")
    violation = judged(path, pool, "OWN-3", ranks="2").violations[0]
    with pytest.raises(SystemExit) as ended:
        main(violation.repeat.split()[1:])
    assert ended.value.code == 1
    shown = capsys.readouterr().out
    assert "1 case," in shown
    assert violation.case in shown


def test_the_command_line_says_what_was_not_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from moetail.conformance.cli import main

    words = ["--virtual-ranks", "--ranks", "2,5", "--rule", "OWN-3", "--op", "gather"]
    with pytest.raises(SystemExit) as ended:
        main(["check", written(tmp_path), *words])
    assert ended.value.code == 0
    out = " ".join(capsys.readouterr().out.split())  # it is folded between words
    said = "BeamAllReduceWorkspace.virtual of 5 ranks raised ValueError: at most 4 ranks"
    assert re.search(rf"Not judged: OWN-3 of gather \(\d+ cases\): {re.escape(said)}", out)


def test_what_has_no_virtual_ranks_is_not_judged(tmp_path: Path, pool: RankPool) -> None:
    subject = subject_of(written(tmp_path, HOOK="None"), pool)
    case = Case(GATHER, tokens=5, ranks=2, strategy="unfused")
    with pytest.raises(NotJudged, match='no all_gather for "unfused"'):
        subject.run(CallSpec(case))
    with pytest.raises(NotJudged, match="virtual of 5 ranks raised ValueError: at most 4 ranks"):
        subject.run(CallSpec(case.replace(ranks=5)))
    (run,) = subject.run(CallSpec(case.replace(strategy="oneshot")))
    assert not any(outcome.refusal for outcome in run.outcomes)


def test_the_hook_is_counted_and_is_the_workspaces_own(tmp_path: Path) -> None:
    specs = [
        CallSpec(Case(GATHER, tokens=5, ranks=2, strategy=name)) for name in ("unfused", "twoshot")
    ]
    for first, second in execute_together(None, 0, 2, written(tmp_path), "cpu", tuple(specs)):
        assert (first.refusal, first.hook_calls) == ("", 1)
        assert (second.refusal, second.hook_calls) == ("", 0)


def test_steps_behind_a_refusal_are_not_reached(tmp_path: Path, pool: RankPool) -> None:
    case = Case(GATHER, tokens=5, ranks=2)
    specs = (CallSpec(case), CallSpec(case, "other-hidden-size"), CallSpec(case))
    legal, refused, behind = subject_of(written(tmp_path), pool).run(*specs)
    assert not any(outcome.refusal for outcome in legal.outcomes)
    assert all("ContractError" in outcome.refusal for outcome in refused.outcomes)
    assert all(outcome.refusal.startswith("not reached") for outcome in behind.outcomes)


def test_workspaces_are_kept_only_where_asked(tmp_path: Path) -> None:
    path = written(tmp_path, BEFORE="if getattr(self, 'fails', False): raise OSError")
    made = load(path).target.BeamAllReduceWorkspace.made
    specs = (CallSpec(Case(ALLREDUCE, tokens=5, ranks=2, hidden=512)),)

    def run(keep: bool, *changed: CallSpec) -> list[tuple[int, int, int]]:
        del made[:]
        execute_together(None, 0, 2, path, "cpu", changed or specs, keep)
        return [each for each in made if each[0] == 2]  # others load kernels

    assert run(False) == run(False) == [(2, 512, 5)]
    assert run(True) == [(2, 512, 512)]
    assert run(True) == []
    assert run(False) == [(2, 512, 5)]
    # A refusal is asked of a new one, and a call that raises may have left anything in it.
    assert run(True, CallSpec(specs[0].case, "other-hidden-size")) == [(2, 512, 5)]
    assert run(True) == []
    load(path).target.threads.fails = True
    assert run(True) == []
    load(path).target.threads.fails = False
    assert run(True) == [(2, 512, 512)]


def test_a_deadline_is_shortened(tmp_path: Path) -> None:
    path = written(tmp_path, AFTER="self.deadline = workspace.deadline_s")
    execute_together(None, 0, 2, path, "cpu", (CallSpec(Case(GATHER, tokens=5, ranks=2)),))
    assert load(path).target.threads.deadline == VIRTUAL_DEADLINE


def test_the_results_are_those_of_processes(tmp_path: Path, pool: RankPool) -> None:
    case = Case(GATHER, tokens=7, ranks=3, post="affine", next="affine", strategy="unfused")
    other = case.replace(seed=1)
    specs = (CallSpec(case, fill=True), CallSpec(other, reuse=True, guard=True))
    real = Subject.of("reference", make_plan(ranks="3"))
    try:
        wanted = real.run(*specs)
    finally:
        real.close()
    found = subject_of(written(tmp_path), pool).run(*specs)
    for mine, theirs in zip(found, wanted, strict=True):
        for left, right in zip(mine.outcomes, theirs.outcomes, strict=True):
            assert not left.refusal
            assert left.changed == ()
            assert all(map(same_bits, left.value, right.value))


def test_the_processes_find_what_cuda_must(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    path = written(tmp_path, BEFORE="import os; raise OSError(os.environ['CUDA_MODULE_LOADING'])")
    subject = Subject.of(path, make_plan(ranks="2", virtual_ranks=True))
    try:
        (run,) = subject.run(CallSpec(Case(GATHER, tokens=5, ranks=2)))
    finally:
        subject.close()
    assert [outcome.refusal for outcome in run.outcomes] == ["OSError: EAGER"] * 2
    assert "CUDA_MODULE_LOADING" not in os.environ


def test_a_process_that_dies_is_the_virtual_ranks(tmp_path: Path, pool: RankPool) -> None:
    path = written(tmp_path, BEFORE="import os; os._exit(7)")
    with pytest.raises(RankError, match=r"the 2 virtual ranks died \(exit code 7\) in beam"):
        subject_of(path, pool).run(CallSpec(Case(GATHER, tokens=5, ranks=2)))
