"""What a test of the suite is: a rule, the cases it looks at, and a function that decides.

The suite's test functions are checks. pytest runs them (``moetail check`` is pytest underneath),
and so does the catalogue of mutants, in process and without pytest: both go through this module.
"""

from __future__ import annotations

import hashlib
import random
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from moetail.conformance.cases import Case, variations
from moetail.conformance.implementation import Implementation, load
from moetail.conformance.judge import Verdict, judge
from moetail.conformance.run import ranks
from moetail.conformance.run.call import (
    Outcome,
    Raised,
    Step,
    bits,
    execute,
    flatten,
    outputs,
    same_bits,
)
from moetail.conformance.run.ranks import RankError, RankPool
from moetail.conformance.run.virtual import ENVIRONMENT, Lost, execute_together
from moetail.conformance.run.workspaces import Unsupported, describe_workspace
from moetail.spec import operation, rule
from moetail.spec.rules import WORKSPACE

__all__ = [
    "CHECKS",
    "PROFILES",
    "TAIL",
    "Check",
    "NotJudged",
    "Plan",
    "Run",
    "Tail",
    "Tally",
    "Trial",
    "Violation",
    "checks_rule",
]

PROFILES = ("quick", "full", "soak")

TAIL = "TAIL"
"""Stands in a rule's place where whole tails are judged: the diagnosis then names the rule."""


@dataclass(frozen=True)
class Plan:
    """How much to check, and where.

    Attributes:
        profile: "quick" (half a minute on two cores), "full" (three) or "soak".
        seed: shifts every case's seed; the same plan makes the same cases.
        ranks: the numbers of ranks that distributed operations run with.
        device: "cpu" or "cuda".
        timeout: seconds that a distributed call may take.
        virtual_ranks: all ranks of a distributed operation run on one GPU, in one process.
        keep_workspaces: a workspace serves one trial after the other, where making one takes long;
            what is wrong then is tried on a new one before it is believed.
    """

    profile: str = "quick"
    seed: int = 0
    ranks: tuple[int, ...] = (1, 2, 3, 4, 8)
    device: str = "cpu"
    timeout: float = 60.0
    virtual_ranks: bool = False
    keep_workspaces: bool = False

    def pick(self, quick: int, full: int, soak: int | None = None) -> int:
        """The number for this profile."""
        return {"quick": quick, "full": full, "soak": soak or 4 * full}[self.profile]

    def random(self, *names: object) -> random.Random:
        """A generator of its own for every use, the same in every process."""
        text = "/".join(map(str, (self.seed, self.profile, *names)))
        return random.Random(hashlib.sha256(text.encode()).digest())

    @property
    def shown(self) -> dict[str, Any]:
        """What a report says of the plan."""
        return {
            "profile": self.profile,
            "seed": self.seed,
            "ranks": list(self.ranks),
            "device": self.device,
            **({"virtual_ranks": True} if self.virtual_ranks else {}),
        }

    def group_sizes(self, name: str) -> tuple[int, ...]:
        """The numbers of ranks an operation runs with."""
        return self.ranks if operation(name).distributed else (1,)


@dataclass(frozen=True)
class Trial:
    """One run of a check.

    Attributes:
        operation: the operation on trial.
        case: whose arguments it gets.
        variation: of the arguments, a name of :mod:`.variations`, or "".
    """

    operation: str
    case: Case
    variation: str = ""

    @property
    def id(self) -> str:
        """The case's id, and the variation behind a tilde."""
        return f"{self.case.id}~{self.variation}" if self.variation else self.case.id

    @classmethod
    def parse(cls, text: str, operation: str = "") -> Trial:
        """The trial of that id; ValueError where it is none."""
        shown, _, variation = text.partition("~")
        case = Case.parse(shown)
        return cls(operation or case.operation, case, variation)


class NotJudged(Exception):
    """A trial that cannot be decided here; the message says why."""


class Violation(AssertionError):
    """An implementation breaks a rule.

    Attributes:
        rule, operation, trial: what was broken by what, and the trial's id.
        found: one sentence, with the first wrong element and what was admissible.
        verdict: the judge's verdict, where the judge decided.
        runs: the runs that showed it.
        compared: an output's name and its two values, where two runs should have given the same.
    """

    def __init__(
        self,
        rule_id: str,
        trial: Trial,
        found: str,
        *,
        verdict: Verdict | None = None,
        runs: Sequence[Run] = (),
        compared: tuple[str, Tensor, Tensor] | None = None,
    ) -> None:
        super().__init__(found)
        self.rule = rule_id
        self.operation = trial.operation
        self.trial = trial
        self.found = found
        self.verdict = verdict
        self.runs = tuple(runs)
        self.compared = compared

    @property
    def trace(self) -> str:
        """The first traceback of the implementation among the runs, or ""."""
        traces = (outcome.trace for run in self.runs for outcome in run.outcomes if outcome.trace)
        return next(traces, "")


@dataclass
class Tally:
    """What a trial looked at; a trial that looked at nothing is not green.

    Attributes:
        judged: elements that the judge decided, or comparisons made where there are no elements.
        not_judged: elements whose class depends on a legal choice.
        ambiguous: judged elements with two admissible values.
    """

    judged: int = 0
    not_judged: int = 0
    ambiguous: int = 0

    def add(self, other: Tally) -> None:
        self.judged += other.judged
        self.not_judged += other.not_judged
        self.ambiguous += other.ambiguous


@dataclass
class Run:
    """A step and what came of it on every rank."""

    step: Step
    outcomes: list[Outcome]

    @property
    def refused(self) -> bool:
        """Every rank raised."""
        return all(outcome.refusal for outcome in self.outcomes)

    @property
    def values(self) -> list[Any]:
        return [outcome.value for outcome in self.outcomes]

    @cached_property
    def calls(self) -> list[dict[str, Any]]:
        """The arguments before the call, rank by rank, where the results are."""
        case = self.step.case
        device = next((str(t.device) for _, t in flatten(self.values)), "cpu")
        calls = [case.arguments(rank, device) for rank in range(case.ranks)]
        if self.step.variation:
            name = self.step.variation
            calls = [variations.apply(name, case, rank, call) for rank, call in enumerate(calls)]
        return calls


@dataclass
class Tail:
    """The implementation on trial, and the means to run and to judge it.

    Attributes:
        rule, trial, tally: what is being decided, and how much was looked at so far.
        ended: operations that left a rank behind, and how; they are not tried again.
        fresh: no workspace may have served earlier trials.
        shared: one of this trial's may have.
        diagnosed: the sizes of the violations that were diagnosed, by rule and operation.
        shown: the sizes of the smallest and the largest violation so far, by the rule that was
            named and operation; a report shows those.
    """

    implementation: Implementation
    plan: Plan
    rule: str = ""
    trial: Trial | None = None
    tally: Tally = field(default_factory=Tally)
    ended: dict[str, str] = field(default_factory=dict)
    fresh: bool = False
    shared: bool = False
    diagnosed: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    shown: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    _pool: RankPool | None = None

    @classmethod
    def of(cls, spec: str, plan: Plan, pool: RankPool | None = None) -> Tail:
        return cls(load(spec), plan, _pool=pool)

    @property
    def pool(self) -> RankPool:
        """The rank processes, started when first needed."""
        if self._pool is None:
            size, environment = max(self.plan.ranks), {}
            if self.plan.virtual_ranks:
                size, environment = 1, ENVIRONMENT
            elif self.plan.device == "cuda":
                size = max(1, min(size, torch.cuda.device_count()))
            self._pool = RankPool(
                size,
                device=self.plan.device,
                timeout=self.plan.timeout,
                environment=environment,
            )
        return self._pool

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def begin(self, rule_id: str, trial: Trial) -> None:
        """Everything from here on counts for this rule and trial."""
        self.rule, self.trial, self.tally, self.shared = rule_id, trial, Tally(), False

    # --- running ------------------------------------------------------------------------------

    def run(self, *steps: Step) -> list[Run]:
        """Carry out steps, on all ranks of a distributed operation with one workspace."""
        case, device = steps[0].case, self.plan.device
        if operation(case.operation).distributed:
            keep = self.plan.keep_workspaces and not self.fresh
            self.shared |= keep
            on_ranks = self._on_virtual_ranks if self.plan.virtual_ranks else self._on_ranks
            by_rank = on_ranks(case, (self.implementation.spec, device, steps, keep))
        else:
            by_rank = [execute(None, 0, self.implementation.spec, device, steps)]
        by_step = zip(*(_padded(outcomes, len(steps)) for outcomes in by_rank), strict=True)
        return [Run(step, list(each)) for step, each in zip(steps, by_step, strict=True)]

    def _on_ranks(self, case: Case, arguments: tuple[Any, ...]) -> list[list[Outcome]]:
        """Each rank's outcomes, up to one that raised."""
        self._need_gpus(case.ranks)
        returned = self.pool.run(case.ranks, execute, *arguments, operation=case.operation)
        return [_outcomes(outcome) for outcome in returned]

    def _on_virtual_ranks(self, case: Case, arguments: tuple[Any, ...]) -> list[list[Outcome]]:
        """As :meth:`_on_ranks`, in one process of the pool, which a call that hangs can take."""
        name, ranks = case.operation, range(case.ranks)
        try:
            (returned,) = self.pool.run(1, execute_together, case.ranks, *arguments, operation=name)
        except RankError as error:
            message = f"the {case.ranks} virtual ranks {error.reason} in {name}"
            raise RankError(message, ranks, name, error.reason, error.details) from error
        if returned.error is None:
            return list(returned.value)
        found = returned.error.exception
        if isinstance(found, Unsupported):
            raise NotJudged(str(found))
        if isinstance(found, Lost):
            message = f"{found} in {name} ({case.ranks} virtual ranks)"
            raise RankError(message, ranks, name, str(found), returned.error.traceback)
        raise RuntimeError(
            f"the virtual ranks failed outside the operation: {returned.error.type}: "
            f"{returned.error.message}\n{returned.error.traceback}"
        )

    def _need_gpus(self, ranks: int) -> None:
        if self.plan.device == "cuda" and ranks > (found := torch.cuda.device_count()):
            raise NotJudged(
                f"{ranks} ranks need as many GPUs, not {found}; --virtual-ranks puts them on one"
            )

    def workspaces(
        self, size: int, hidden_size: int, max_tokens: int, dtype: str
    ) -> list[dict[str, Any]]:
        """What ``BeamAllReduceWorkspace.create`` made on each rank of a group of ``size``."""
        if self.plan.virtual_ranks:
            raise NotJudged("create takes a process group, which virtual ranks do not have")
        self._need_gpus(size)
        returned = self.pool.run(
            size,
            describe_workspace,
            self.implementation.spec,
            hidden_size,
            max_tokens,
            dtype,
            operation=WORKSPACE,
        )
        for outcome in returned:
            if outcome.error is not None:
                raise RuntimeError(f"rank {outcome.rank}: {outcome.error.traceback}")
        return [outcome.value for outcome in returned]

    def converted(self, arguments: dict[str, Any]) -> Any:
        """What a conversion returned; whether it may refuse a legal layout is CONVERT-1's."""
        assert self.trial is not None
        try:
            return self.implementation.get(self.trial.operation)(**arguments)
        except Exception as error:
            raise NotJudged(
                f"raised {type(error).__name__} ({error}), which is CONVERT-1's to say"
            ) from error

    # --- deciding -----------------------------------------------------------------------------

    def violation(self, found: str, **details: Any) -> Violation:
        assert self.trial is not None
        return Violation(self.rule, self.trial, found, **details)

    def require(self, condition: bool, found: str, *runs: Run) -> None:
        """One comparison, counted; ``found`` says what is wrong where it does not hold."""
        self.tally.judged += 1
        if not condition:
            raise self.violation(found, runs=runs)

    def returned(self, run: Run) -> None:
        """The call is legal, so no rank may have raised."""
        for rank, outcome in enumerate(run.outcomes):
            if outcome.refusal:
                where = f"rank {rank}: " if len(run.outcomes) > 1 else ""
                raise self.violation(
                    f"{where}raised on legal arguments: {outcome.refusal}", runs=[run]
                )

    def conforms(self, *runs: Run) -> None:
        """Every element of every run is admissible."""
        for run in runs:
            self.returned(run)
            self.conforms_values(run, run.calls)

    def conforms_values(self, run: Run, calls: list[dict[str, Any]]) -> None:
        """What a run returned is admissible for the arguments ``calls``, rank by rank."""
        verdict = judge(run.step.case.operation, calls, run.values)
        self.tally.add(Tally(verdict.judged, verdict.not_judged, verdict.ambiguous))
        if not verdict.conforms:
            raise self.violation(
                f"{verdict.describe()} ({verdict.wrong} of {verdict.judged} elements wrong)",
                verdict=verdict,
                runs=[run],
            )

    def conforms_at(self, run: Run, tokens: Tensor) -> None:
        """Every element of the tokens in a bool mask ``[T]`` is admissible."""
        verdict = judge(run.step.case.operation, run.calls, run.values)
        for output in verdict.outputs:
            mask = tokens.to(output.wrong_mask.device)
            wrong = output.wrong_mask & mask[:, None]
            self.tally.judged += int(mask.sum()) * wrong.shape[1]
            if bool(wrong.any()):
                token = int(wrong.nonzero()[0][0])
                raise self.violation(
                    f"{verdict.describe()} ({int(wrong.sum())} wrong, from token {token} on)",
                    verdict=verdict,
                    runs=[run],
                )

    def classes(self, *runs: Run) -> None:
        """Every element is NaN, infinite or finite where its admissible values are."""
        for run in runs:
            self.returned(run)
            verdict = judge(run.step.case.operation, run.calls, run.values)
            for output in verdict.outputs:
                if output.got is None or output.lo is None or output.hi is None:
                    raise self.violation(verdict.describe(), verdict=verdict, runs=[run])
                same = (output.lo == output.hi) | output.lo.isnan()
                judged = same | (output.lo.isfinite() & output.hi.isfinite())
                infinite = output.lo.isinf() & (output.got != output.lo)
                wrong = judged & (
                    (output.got.isnan() != output.lo.isnan())
                    | (output.got.isinf() != output.lo.isinf())
                    | infinite
                )
                self.tally.judged += int(judged.sum())
                self.tally.not_judged += int((~judged).sum())
                if bool(wrong.any()):
                    index = tuple(int(i) for i in wrong.nonzero()[0])
                    where = f"rank {output.rank}: " if len(run.outcomes) > 1 else ""
                    raise self.violation(
                        f"{where}{output.name}{list(index)} is {float(output.got[index])!r}; "
                        f"admissible: {float(output.lo[index])!r} "
                        f"({int(wrong.sum())} of {wrong.numel()} elements are of another class)",
                        verdict=verdict,
                        runs=[run],
                    )

    def same(self, first: Run, second: Run, what: str) -> None:
        """Two runs gave the same bits on every rank."""
        self.returned(first)
        self.returned(second)
        for rank, (left, right) in enumerate(zip(first.values, second.values, strict=True)):
            self.same_values(
                left, right, f"{what}, on rank {rank}" if rank else what, first, second
            )

    def same_values(self, left: Any, right: Any, what: str, *runs: Run) -> None:
        """Two results have the same bits; the violation shows the first element that differs."""
        names_left, names_right = outputs(left), outputs(right)
        self.require(
            names_left.keys() == names_right.keys(), f"{what}: other outputs are None", *runs
        )
        for name, tensor in names_left.items():
            other = names_right[name]
            self.tally.judged += max(1, tensor.numel())
            if same_bits(tensor, other):
                continue
            if tensor.shape != other.shape or tensor.dtype != other.dtype:
                raise self.violation(
                    f"{what}: {list(tensor.shape)} {tensor.dtype} against "
                    f"{list(other.shape)} {other.dtype}",
                    runs=runs,
                )
            differs = bits(tensor) != bits(other.to(tensor.device))
            index = tuple(int(i) for i in differs.nonzero()[0])
            place = f"{name}{list(index)}"
            raise self.violation(
                f"{what}: {place} is {float(tensor[index])!r} and then {float(other[index])!r} "
                f"({int(differs.sum())} of {differs.numel()} elements differ)",
                runs=runs,
                compared=(name, tensor, other),
            )


def _outcomes(returned: ranks.Outcome) -> list[Outcome]:
    """A rank's outcomes, up to the step that raised if one did."""
    if returned.error is None:
        return list(returned.value)
    raised = returned.error.exception
    if not isinstance(raised, Raised):
        raise RuntimeError(
            f"rank {returned.rank} failed outside the operation: {returned.error.type}: "
            f"{returned.error.message}\n{returned.error.traceback}"
        )
    return raised.outcomes


def _padded(outcomes: list[Outcome], steps: int) -> list[Outcome]:
    """One outcome for each step, also for those behind one that raised."""
    last = outcomes[-1].refusal or "on another rank"
    missing = Outcome(refusal=f"not reached, since an earlier call raised {last}")
    return [*outcomes, *[missing] * (steps - len(outcomes))]


class _Decide(Protocol):
    def __call__(self, tail: Tail, trial: Trial) -> None: ...


Trials = Callable[[Plan, str], Iterable[Trial]]


@dataclass(frozen=True)
class Check:
    """One test of the suite.

    Attributes:
        rule: the rule it decides.
        name: the test function's name.
        operations: names of the operations it applies to.
        trials: what it is tried on, for a plan and an operation.
        decide: raises :class:`Violation` or :class:`NotJudged`.
        varies: whether its trials have a variation; None where some do.
    """

    rule: str
    name: str
    operations: tuple[str, ...]
    trials: Trials
    decide: _Decide
    varies: bool | None

    def run(self, tail: Tail, trial: Trial) -> Tally:
        """Decide one trial; the tally says how much was looked at.

        Raises:
            Violation: the rule is broken.
            NotJudged: nothing could be decided.
        """
        tail.begin(self.rule, trial)
        if trial.operation in tail.ended:
            raise NotJudged(f"ended by an earlier trial: {tail.ended[trial.operation]}")
        found = self._tried(tail, trial)
        if found is not None and tail.shared:
            found = self._tried_afresh(tail, trial, found)
        if isinstance(found, RankError):
            # Every further trial would wait as long.
            tail.ended[trial.operation] = _said(found)
            raise tail.violation(_said(found)) from found
        if found is not None:
            raise found
        return tail.tally

    def _tried(self, tail: Tail, trial: Trial) -> Violation | NotJudged | RankError | None:
        """What speaks against the trial."""
        try:
            self.decide(tail, trial)
        except (Violation, NotJudged, RankError) as error:
            return error
        except Exception as error:
            if tail.fresh or not tail.shared:
                raise
            return NotJudged(f"{type(error).__name__}: {error}")  # and tried again
        return NotJudged("no element and no comparison") if tail.tally.judged == 0 else None

    def _tried_afresh(
        self, tail: Tail, trial: Trial, found: Violation | NotJudged | RankError
    ) -> Violation | NotJudged | RankError | None:
        """What speaks against it on workspaces that have served no other trial.

        If nothing does any more, what they served before is to blame, and RUN-5 is broken.
        """
        tail.begin(self.rule, trial)
        tail.fresh = True
        again = self._tried(tail, trial)
        if again is not None or isinstance(found, NotJudged):
            tail.fresh = False
            undecided = isinstance(again, NotJudged) and not isinstance(found, NotJudged)
            return found if undecided else again
        # From here on every trial gets new workspaces, or each would be tried twice.
        tail.rule = "RUN-5"
        return tail.violation(
            f"on a workspace that served earlier calls, and not on a new one: {_said(found)}"
        )


def _said(found: Exception) -> str:
    return str(found).replace("raised Raised: ", "raised ")


CHECKS: list[Check] = []
_COMPUTING = rule("RUN-1").operations


def checks_rule(
    rule_id: str,
    trials: Trials,
    *,
    operations: Sequence[str] | None = None,
    varies: bool | None = False,
) -> Callable[[_Decide], _Decide]:
    """Make a function the check of a rule, for all operations of the rule or for those given."""
    if operations is not None:
        applies = tuple(operations)
    else:
        applies = _COMPUTING if rule_id == TAIL else rule(rule_id).operations

    def register(function: _Decide) -> _Decide:
        check = Check(rule_id, function.__name__, applies, trials, function, varies)  # type: ignore[attr-defined]
        CHECKS.append(check)
        function.moetail_check = check  # type: ignore[attr-defined]
        return function

    return register


def repeat_command(spec: str, plan: Plan, rule_id: str, trial: Trial) -> str:
    """The one command that repeats a trial."""
    words = ["moetail", "check", spec, "--rule", rule_id, "--op", trial.operation]
    words += ["--case", trial.id]
    if plan.device != "cpu":
        words += ["--device", plan.device]
    if plan.virtual_ranks:
        words.append("--virtual-ranks")
    return shlex.join(words)


def all_trials(
    check: Check, plan: Plan, provided: Sequence[str], operations: Sequence[str] = ()
) -> Iterator[Trial]:
    """The trials of a check on the operations that are provided and asked for, in order."""
    for name in check.operations:
        if name in provided and (not operations or name in operations):
            seen: set[str] = set()
            for trial in check.trials(plan, name):
                if trial.id not in seen:
                    seen.add(trial.id)
                    yield trial
