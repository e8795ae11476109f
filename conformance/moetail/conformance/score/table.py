"""The catalogue put to the suite: every mutant must be killed, by the rule that it breaks, and no
variant may be rejected."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field

import torch

from moetail.conformance.catalogue import MUTANTS, VARIANTS, Change, Mutant, change
from moetail.conformance.diagnosis import diagnose, rule_named
from moetail.conformance.run.check import planned
from moetail.conformance.run.plan import Plan
from moetail.conformance.run.ranks import RankPool, end_with_parent
from moetail.conformance.run.results import VIOLATES, TrialResult
from moetail.conformance.run.runner import run_trial
from moetail.conformance.run.subject import Subject
from moetail.conformance.run.trial import Violation
from moetail.conformance.suite import checks
from moetail.spec import operation

__all__ = ["Row", "Table", "run_catalogue"]


@dataclass(frozen=True)
class Row:
    """What the suite said of one implementation.

    Attributes:
        id: of the mutant or variant.
        variant: whether it is legal.
        expected: the rule a mutant breaks; "" for a variant.
        also: rules that it may be said to break too.
        first: the rule that the report names first, "" where nothing was found.
        check, operation, case: of the smallest violation of that rule.
        found: what was wrong there.
        deviations, explained: ids of the mutants that explain the violation of that check with most
            wrong elements, and the share of those that they do; they may name the rule.
        exposure: the largest share of judged elements that were wrong in one trial of that check;
            None where the judge did not decide it.
        judged: elements and comparisons that were looked at.
        not_judged: elements whose class depends on a legal choice.
        trials: how many were run; a mutant's end with the check that rejects it.
        seconds: wall-clock.
        error: a fault of the suite itself, or "".
    """

    id: str
    variant: bool
    expected: str = ""
    also: tuple[str, ...] = ()
    first: str = ""
    check: str = ""
    operation: str = ""
    case: str = ""
    found: str = ""
    deviations: tuple[str, ...] = ()
    explained: float = 0.0
    exposure: float | None = None
    judged: int = 0
    not_judged: int = 0
    trials: int = 0
    seconds: float = 0.0
    error: str = ""

    @property
    def killed(self) -> bool:
        """Rejected, by whatever rule."""
        return bool(self.first)

    @property
    def right(self) -> bool:
        """As it must be: a mutant killed by its rule first, a variant accepted."""
        if self.error:
            return False
        return not self.killed if self.variant else self.first == self.expected


@dataclass
class Table:
    """All rows, mutants in the catalogue's order and then variants."""

    plan: Plan
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def mutants(self) -> list[Row]:
        return [row for row in self.rows if not row.variant]

    @property
    def variants(self) -> list[Row]:
        return [row for row in self.rows if row.variant]

    @property
    def survivors(self) -> list[Row]:
        return [row for row in self.mutants if not row.killed]

    @property
    def misnamed(self) -> list[Row]:
        """Killed, but another rule was named first."""
        return [row for row in self.mutants if row.killed and not row.right]

    @property
    def false_alarms(self) -> list[Row]:
        return [row for row in self.variants if row.killed]

    @property
    def errors(self) -> list[Row]:
        return [row for row in self.rows if row.error]

    @property
    def judged(self) -> int:
        """Elements and comparisons of variants that were looked at."""
        return sum(row.judged for row in self.variants)

    @property
    def exit_code(self) -> int:
        return 0 if all(row.right for row in self.rows) else 1


def examine(entry: Change, plan: Plan, pool: RankPool | None = None) -> Row:
    """Run the suite against one implementation, on the operations that it can change; in the quick
    profile on those that need one process only, if there are any.

    Checks run in the order in which they are believed; a mutant's run ends with the first check
    that rejects it, since that one names the rule.
    """
    started = time.perf_counter()
    subject = Subject.of(entry.name, plan, pool)
    mutant = isinstance(entry, Mutant)
    worst: TrialResult | None = None
    telling: Violation | None = None
    exposure: float | None = None
    judged = not_judged = trials = 0
    most = 0
    first = error = ""
    deviations: tuple[str, ...] = ()
    explained = 0.0
    operations = entry.operations
    local = tuple(name for name in operations if not operation(name).distributed)
    if plan.profile == "quick" and local:
        operations = local
    try:
        provided = subject.implementation.provided
        for check, trial in planned(checks(), plan, provided, operations=operations):
            if mutant and worst is not None and check.name != worst.check:
                break
            result, raised = run_trial(check, subject, trial, diagnosing=False)
            trials += 1
            judged += result.judged
            not_judged += result.not_judged
            if result.status != VIOLATES:
                continue
            if (
                worst is None
                or (result.check == worst.check) * (worst.elements - result.elements) > 0
            ):
                worst = result
            if isinstance(raised, Violation) and raised.verdict is not None:
                share = raised.verdict.wrong / max(1, raised.verdict.judged)
                exposure = max(exposure or 0.0, share)
                if raised.verdict.wrong > most:
                    most, telling = raised.verdict.wrong, raised
        if telling is not None and telling.verdict is not None and telling.runs:
            # The one with most wrong elements tells most.
            calls = telling.runs[0].calls
            found = diagnose(telling.operation, calls, telling.verdict, prefer=telling.rule)
            first = rule_named(telling.rule, found)
            deviations, explained = tuple(item.id for item in found.deviations), found.share
    except Exception as fault:
        error = f"{type(fault).__name__}: {fault}"
    return Row(
        entry.id,
        variant=not mutant,
        expected=entry.rule if isinstance(entry, Mutant) else "",
        also=entry.also if isinstance(entry, Mutant) else (),
        first=first or (worst.rule if worst else ""),
        check=worst.check if worst else "",
        operation=worst.operation if worst else "",
        case=worst.case if worst else "",
        found=worst.found if worst else "",
        deviations=deviations,
        explained=explained,
        exposure=exposure,
        judged=judged,
        not_judged=not_judged,
        trials=trials,
        seconds=time.perf_counter() - started,
        error=error,
    )


_POOL: RankPool | None = None


def _start(plan: Plan) -> None:
    """A worker's own pool of ranks, which it keeps for all that it examines."""
    global _POOL
    # A command that is killed cannot end its workers, and what they do may take an hour.
    end_with_parent()
    torch.set_num_threads(1)
    _POOL = RankPool(max(plan.ranks), device=plan.device, timeout=plan.timeout)


def _examine(change_id: str, plan: Plan) -> Row:
    return examine(change(change_id), plan, _POOL)


def _cost(entry: Change) -> tuple[bool, bool, int]:
    """Longest first: variants run to the end, and ranks cost more than one process."""
    distributed = any(operation(name).distributed for name in entry.operations)
    return isinstance(entry, Mutant), not distributed, -len(entry.operations)


def run_catalogue(
    plan: Plan,
    *,
    workers: int = 2,
    only: Iterable[str] = (),
    progress: Callable[[Row, int, int], None] = lambda row, done, total: None,
) -> Table:
    """Examine every mutant and variant, or those of the ids given, in worker processes.

    Args:
        plan: profile, seed, and the numbers of ranks that distributed operations run with.
        workers: processes, each with rank processes of its own.
        progress: called after each with the row and how many of how many are done.
    """
    started = time.perf_counter()
    wanted = set(only)
    everything: tuple[Change, ...] = (*MUTANTS, *VARIANTS)
    entries = [item for item in everything if not wanted or item.id in wanted]
    rows: dict[str, Row] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_start, initargs=(plan,)) as pool:
        futures: dict[Future[Row], Change] = {
            pool.submit(_examine, item.id, plan): item for item in sorted(entries, key=_cost)
        }
        for done, future in enumerate(as_completed(futures), start=1):
            row = future.result()
            rows[row.id] = row
            progress(row, done, len(entries))
    ordered = [rows[item.id] for item in entries]
    return Table(plan, ordered, time.perf_counter() - started)
