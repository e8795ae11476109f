"""Workspaces that serve one execution after the other: which are kept, and what comes of a fault
that only those show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moetail.conformance.cases import Case
from moetail.conformance.cases.rewrites import REWRITES
from moetail.conformance.catalogue import change
from moetail.conformance.run import workspaces
from moetail.conformance.run.call import CallSpec, wanted
from moetail.conformance.run.check import Check
from moetail.conformance.run.options import make_plan
from moetail.conformance.run.plan import Plan
from moetail.conformance.run.ranks import PoolError, RankError, RankPool
from moetail.conformance.run.results import CONFORMS, NOT_JUDGED, VIOLATES
from moetail.conformance.run.runner import run_trial
from moetail.conformance.run.subject import Subject
from moetail.conformance.run.trial import NotJudged, Tally, Trial
from moetail.conformance.run.workspaces import Workspaces
from moetail.conformance.score.table import examine
from moetail.conformance.suite import run_suite
from moetail.spec.rules import ALLREDUCE, GATHER, WORKSPACE

KEEPING = replace(make_plan(ranks="1,2"), keep_workspaces=True)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout=30.0, grace=1.0) as made:
        yield made


# --- what is kept ---------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def shelves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspaces, "_SHELVES", {})


class Maker:
    """Makes workspaces, and remembers hidden size and max_tokens of each."""

    def __init__(self) -> None:
        self.made: list[tuple[int, int]] = []

    def __call__(self, hidden: int, max_tokens: int) -> list[Any]:
        self.made.append((hidden, max_tokens))
        fields = {"moe_gather_oneshot_max_tokens": 64, "moe_gather_separate_norm_min_tokens": None}
        return [SimpleNamespace(all_gather="own", **fields)]

    def take(
        self,
        *wanted: tuple[int, int, bool],
        group: object = "group",
        implementation: str = "one",
        keep: bool = True,
    ) -> Workspaces:
        """An execution whose specs want that."""
        taken = Workspaces(self, implementation, group, list(wanted), keep)
        for hidden, _, _ in wanted:
            taken.get(hidden)
        return taken


def test_one_serves_while_it_is_large_enough() -> None:
    maker = Maker()
    for tokens in (1, 0, 512, 3):
        maker.take((256, tokens, False))
    assert maker.made == [(256, 512)]
    maker.take((256, 3, False), (256, 600, False))
    maker.take((256, 1024, False))
    assert maker.made == [(256, 512), (256, 1024)]


def test_who_needs_a_new_one_or_keeps_nothing_gets_a_new_one() -> None:
    maker = Maker()
    maker.take((256, 9, False))
    del maker.made[:]
    maker.take((256, 9, True), (256, 1, False))
    maker.take((256, 8, True))
    maker.take((256, 9, False), (512, 4, False), keep=False)
    assert maker.made == [(256, 9), (256, 8), (256, 9), (512, 4)]
    maker.take((256, 9, False))
    assert len(maker.made) == 4


def test_the_longest_unused_goes_first() -> None:
    maker = Maker()
    most = workspaces._MOST_KEPT
    for hidden in range(1, most + 1):
        maker.take((hidden, 1, False))
    maker.take((1, 1, False))
    maker.take((most + 1, 1, False))
    del maker.made[:]
    maker.take((1, 1, False))
    maker.take((2, 1, False))
    assert maker.made == [(2, 512)]


def test_who_needs_a_new_one() -> None:
    """Where a refusal is expected: a broken workspace would refuse anything."""
    case = Case(GATHER, tokens=3, ranks=2)
    specs = (CallSpec(case), CallSpec(case, "other-hidden-size"), CallSpec(case, max_tokens=9))
    assert wanted(specs) == [(256, 3, False), (256, 3, True), (256, 9, True)]
    neutral = next(iter(REWRITES))
    assert wanted((CallSpec(case, neutral),)) == [(256, 3, False)]


def test_groups_and_implementations_share_nothing() -> None:
    maker = Maker()
    maker.take((256, 1, False))
    maker.take((256, 1, False), group="other")
    assert len(maker.made) == 2
    maker.take((256, 1, False), implementation="two")
    maker.take((256, 1, False), implementation="one")
    maker.take((256, 1, False), group="other")
    assert len(maker.made) == 4


def test_a_failed_call_keeps_nothing_that_it_used() -> None:
    maker = Maker()
    maker.take((256, 1, False))
    maker.take((512, 1, False)).drop()
    del maker.made[:]
    maker.take((256, 1, False))
    maker.take((512, 1, False))
    assert maker.made == [(512, 512)]


def test_what_steps_assigned_is_undone() -> None:
    maker = Maker()
    asked = [(256, 1, False)]
    ((workspace, own),) = Workspaces(maker, "one", "group", asked, True).get(256, (7, 9))
    assert (workspace.moe_gather_oneshot_max_tokens, own) == (7, "own")
    workspace.all_gather = "ours"
    ((again, own),) = Workspaces(maker, "one", "group", asked, True).get(256)
    assert again is workspace
    assert own == "own"
    assert vars(again) == vars(maker(0, 0)[0])


def test_on_a_gpu_they_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not make_plan().keep_workspaces
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert make_plan(device="cuda").keep_workspaces


# --- what comes of a fault ------------------------------------------------------------------------

CASE = Case(GATHER, tokens=2, ranks=2)


def tried(
    monkeypatch: pytest.MonkeyPatch, kept: str, fresh: str
) -> tuple[Any, Subject, list[bool]]:
    """A trial that ends in one way on kept workspaces, and in another way on new ones."""
    order: list[bool] = []

    def on_ranks(self: Subject, case: Case, arguments: tuple[Any, ...]) -> list[list[Any]]:
        order.append(arguments[-1])
        raise StopIteration

    def decide(subject: Subject, trial: Trial) -> None:
        with pytest.raises(StopIteration):
            subject.run(CallSpec(trial.case))
        how = kept if order[-1] else fresh
        match how:
            case "violates" | "violates otherwise":
                raise subject.violation(how)
            case "not judged":
                raise NotJudged(how)
            case "hangs":
                raise RankError("rank 1 did not arrive", (1,))
            case "starves":
                raise PoolError(how)
            case "breaks":
                raise ZeroDivisionError(how)
        subject.tally.judged += 1

    monkeypatch.setattr(Subject, "_on_ranks", on_ranks)
    check = Check("OWN-1", "test_own_1", (GATHER,), lambda plan, name: [], decide, (1, 1))
    subject = Subject.of("reference", KEEPING)
    result, _ = run_trial(check, subject, Trial(GATHER, CASE), diagnosing=False)
    return result, subject, order


@pytest.mark.parametrize(
    ("kept", "fresh", "status", "rule", "found"),
    [
        ("conforms", "", CONFORMS, "OWN-1", ""),
        (
            "violates",
            "conforms",
            VIOLATES,
            "RUN-5",
            "earlier calls, and not on a new one: v",
        ),
        ("hangs", "conforms", VIOLATES, "RUN-5", "new one: rank 1 did not arrive"),
        ("violates", "violates otherwise", VIOLATES, "OWN-1", "violates otherwise"),
        ("violates", "not judged", VIOLATES, "OWN-1", "violates"),
        ("not judged", "conforms", CONFORMS, "OWN-1", ""),
        ("not judged", "violates", VIOLATES, "OWN-1", "violates"),
        ("not judged", "not judged", NOT_JUDGED, "OWN-1", "not judged"),
        ("hangs", "hangs", VIOLATES, "OWN-1", "rank 1 did not arrive"),
        ("breaks", "violates", VIOLATES, "OWN-1", "violates"),
    ],
)
def test_a_fault_is_tried_again_on_new_workspaces(
    monkeypatch: pytest.MonkeyPatch, kept: str, fresh: str, status: str, rule: str, found: str
) -> None:
    result, subject, order = tried(monkeypatch, kept, fresh)
    assert (result.status, result.rule) == (status, rule)
    assert found in result.found
    assert order == ([True] if kept == "conforms" else [True, False])
    # Once RUN-5 is known to be broken, nothing is kept any more.
    assert subject.fresh == (rule == "RUN-5")
    assert bool(subject.ended) == (fresh == "hangs")
    if status == VIOLATES:
        assert f"--rule {rule} " in result.repeat


def test_a_fault_of_the_suite_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        tried(monkeypatch, "breaks", "breaks")


def test_the_machine_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PoolError):
        tried(monkeypatch, "starves", "conforms")


@pytest.mark.parametrize(
    "name", ["stride-of-largest-call", "old-rows-after-another-strategy", "waits-for-first-size"]
)
def test_stale_workspaces_are_run_5s(pool: RankPool, name: str) -> None:
    row = examine(change(name), KEEPING, pool)
    assert (row.error, row.first) == ("", "RUN-5")


def test_the_reference_conforms_on_kept_workspaces(pool: RankPool) -> None:
    rules = ("OWN-1", "OWN-4", "DOMAIN-2", "RUN-3", "RUN-5")
    operations = (GATHER, ALLREDUCE, WORKSPACE)
    results = run_suite("reference", KEEPING, pool=pool, rules=rules, operations=operations)
    assert results.verdict == CONFORMS, [trial.found for trial in results.violations]
    statuses = {cell.status for row in results.matrix().values() for cell in row.values()}
    assert statuses == {CONFORMS}


# --- GPUs -----------------------------------------------------------------------------------------


def test_more_ranks_than_gpus_are_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    subject = Subject.of("reference", Plan(ranks=(1, 4), device="cuda"))
    assert subject.pool.size == 2
    try:
        for call in (
            lambda: subject.run(CallSpec(CASE.replace(ranks=4))),
            lambda: subject.workspaces(3, 256, 4, "bfloat16"),
        ):
            with pytest.raises(NotJudged, match=r"[34] ranks need as many GPUs, not 2; --virtual"):
                call()
    finally:
        subject.close()
    assert subject.tally == Tally()
