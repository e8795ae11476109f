"""What came of a run of the suite: trial by trial, as a matrix, and as files."""

from __future__ import annotations

import datetime
import json
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from moetail.conformance.implementation import Implementation
from moetail.conformance.run.plan import Plan
from moetail.spec.rules import OPERATIONS, RULES

__all__ = [
    "CONFORMS",
    "NOT_DECIDED",
    "NOT_JUDGED",
    "NOT_PROVIDED",
    "VIOLATES",
    "Cell",
    "Results",
    "TrialResult",
]

CONFORMS = "conforms"
VIOLATES = "violates"
NOT_DECIDED = "not decided"
NOT_JUDGED = "not judged"
NOT_PROVIDED = "not provided"


@dataclass(frozen=True)
class TrialResult:
    """One trial of one check.

    Attributes:
        rule: the rule that was decided; for a violation that the diagnosis could name, that rule.
        operation, case: the operation and the trial's id.
        check: the test function's name.
        status: CONFORMS, VIOLATES or NOT_JUDGED.
        judged, not_judged, ambiguous: as in :class:`moetail.conformance.run.trial.Tally`.
        elements: the case's size, by which the smallest is found.
        believed: the check's place in the order of belief (see :class:`.check.Phase`).
        found: what was wrong, or why nothing was judged.
        deviations: ids of the mutants that explain it, where it was diagnosed and any are known.
        wrong: wrong elements that the diagnosis looked at; 0 where there was none.
        explained: the share of those that the mutants explain.
        repeat: the command that repeats the trial.
        trace: the implementation's traceback, where it raised.
        evidence: of a violation, the first wrong elements and where all lie, output by output (see
            :mod:`moetail.conformance.run.evidence`); empty where other cases show more.
    """

    rule: str
    operation: str
    case: str
    check: str
    status: str
    judged: int = 0
    not_judged: int = 0
    ambiguous: int = 0
    elements: int = 0
    seconds: float = 0.0
    believed: tuple[int, int] = (99, 0)
    found: str = ""
    deviations: tuple[str, ...] = ()
    wrong: int = 0
    explained: float = 0.0
    repeat: str = ""
    trace: str = ""
    evidence: list[dict[str, Any]] = field(default_factory=list)

    @property
    def properties(self) -> list[tuple[str, str]]:
        """What JUnit reports say of it beside its name."""
        named = {"rule": self.rule, "operation": self.operation, "case": self.case}
        return [*named.items(), ("judged", str(self.judged))]


@dataclass
class Cell:
    """One rule on one operation."""

    status: str
    trials: int = 0
    violations: int = 0
    judged: int = 0
    not_judged: int = 0


@dataclass
class Results:
    """All trials of a run.

    Attributes:
        implementation: as it was named.
        provided: names of the operations it provides.
        plan: the plan's fields.
        planned: how many trials there are to be; 0 where nobody planned them.
        trials: in the order in which they ran.
        stopped: why the run ended early, or "".
        faults: trials that could not be carried out, and why.
    """

    implementation: str
    provided: tuple[str, ...]
    plan: dict[str, Any]
    operations: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    trials: list[TrialResult] = field(default_factory=list)
    stopped: str = ""
    planned: int = 0
    faults: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        implementation: Implementation,
        plan: Plan,
        operations: Sequence[str] = (),
        rules: Sequence[str] = (),
    ) -> Results:
        """Those of a run that has not begun; empty restrictions are everything."""
        return cls(
            implementation.spec,
            implementation.provided,
            plan.shown,
            tuple(operations),
            tuple(rules),
        )

    @property
    def violations(self) -> list[TrialResult]:
        """The smallest violation of every rule on every operation.

        Rules are in the order in which their checks are believed, so the first one names what is
        broken; what follows may be its consequence.
        """
        smallest: dict[tuple[str, str], TrialResult] = {}
        first: dict[str, tuple[int, int]] = {}
        for trial in self.trials:
            if trial.status == VIOLATES:
                key = (trial.rule, trial.operation)
                first[trial.rule] = min(first.get(trial.rule, trial.believed), trial.believed)
                kept = smallest.get(key)
                if kept is None or trial.elements < kept.elements:
                    smallest[key] = trial
        return sorted(
            smallest.values(),
            key=lambda trial: (first[trial.rule], _rule_order(trial.rule), _op(trial)),
        )

    @property
    def judged(self) -> int:
        return sum(trial.judged for trial in self.trials)

    @property
    def not_judged(self) -> int:
        return sum(trial.not_judged for trial in self.trials)

    @property
    def verdict(self) -> str:
        """VIOLATES, NOT_DECIDED where the run ended early, CONFORMS, or NOT_JUDGED where nothing
        was."""
        if any(trial.status == VIOLATES for trial in self.trials):
            return VIOLATES
        if self.stopped or len(self.trials) < self.planned:
            return NOT_DECIDED
        decided = any(trial.status == CONFORMS for trial in self.trials)
        return CONFORMS if decided else NOT_JUDGED

    @property
    def exit_code(self) -> int:
        return {CONFORMS: 0, VIOLATES: 1, NOT_DECIDED: 2, NOT_JUDGED: 3}[self.verdict]

    def asked(self, operation: str) -> bool:
        return not self.operations or operation in self.operations

    def matrix(self) -> dict[str, dict[str, Cell]]:
        """rule id -> operation name -> cell, for the operations that a rule applies to."""
        table: dict[str, dict[str, Cell]] = {}
        for rule in RULES:
            if self.rules and rule.id not in self.rules:
                continue
            table[rule.id] = {
                name: Cell(NOT_JUDGED if name in self.provided else NOT_PROVIDED)
                for name in rule.operations
                if self.asked(name)
            }
        for trial in self.trials:
            row = table.setdefault(trial.rule, {})
            cell = row.setdefault(trial.operation, Cell(NOT_JUDGED))
            cell.trials += 1
            cell.judged += trial.judged
            cell.not_judged += trial.not_judged
            if trial.status == VIOLATES:
                cell.violations += 1
                cell.status = VIOLATES
            elif trial.status == CONFORMS and cell.status == NOT_JUDGED:
                cell.status = CONFORMS
        return {rule_id: row for rule_id, row in table.items() if row}

    def to_json(self) -> dict[str, Any]:
        """The report's content, by names that stay."""
        return {
            "moetail": _version(),
            "implementation": self.implementation,
            "verdict": self.verdict,
            "stopped": self.stopped,
            "plan": self.plan,
            "environment": environment(str(self.plan.get("device", "cpu"))),
            "totals": {
                "planned": self.planned or len(self.trials),
                "trials": len(self.trials),
                "violations": sum(trial.status == VIOLATES for trial in self.trials),
                "judged": self.judged,
                "not_judged": self.not_judged,
                "ambiguous": sum(trial.ambiguous for trial in self.trials),
                "seconds": round(sum(trial.seconds for trial in self.trials), 3),
            },
            "provided": list(self.provided),
            "matrix": {
                rule_id: {name: asdict(cell) for name, cell in row.items()}
                for rule_id, row in self.matrix().items()
            },
            "violations": [_shown(asdict(trial)) for trial in self.violations],
            "not_judged": sorted(
                {
                    f"{trial.rule} {trial.operation}: {trial.found}"
                    for trial in self.trials
                    if trial.status == NOT_JUDGED
                }
            ),
        }

    def json_text(self) -> str:
        """report.json."""
        return json.dumps(self.to_json(), indent=2) + "\n"


def _shown(fields: dict[str, Any]) -> dict[str, Any]:
    """What a report says of a trial: nothing that is empty."""
    hidden = ("believed", *(() if fields["wrong"] else ("wrong", "explained")))
    return {
        name: value
        for name, value in fields.items()
        if value not in ("", [], ()) and name not in hidden
    }


def _rule_order(rule_id: str) -> int:
    ids = [rule.id for rule in RULES]
    return ids.index(rule_id) if rule_id in ids else len(ids)


def _op(trial: TrialResult) -> int:
    return [operation.name for operation in OPERATIONS].index(trial.operation)


def _version() -> str:
    try:
        return version("moetail")
    except PackageNotFoundError:  # run from a source tree on the path
        return "unknown"


def environment(device: str) -> dict[str, str]:
    """Where a run took place."""
    import torch

    found = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
    }
    if device.startswith("cuda") and torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["gpus"] = str(torch.cuda.device_count())
        found["cuda"] = str(torch.version.cuda)
        major, minor = torch.cuda.get_device_capability()
        found["compute capability"] = f"{major}.{minor}"
    return found


def count(number: int, noun: str) -> str:
    """ "1 case", "2,000 cases"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def harmless(text: str) -> str:
    """``text`` with escapes for all that a terminal would act on or cannot show, but line ends."""
    return "".join(
        one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode()
        for one in text
    )


def only(names: Iterable[str], allowed: Sequence[str]) -> tuple[str, ...]:
    """``names`` in the order of ``allowed``."""
    kept = set(names)
    return tuple(name for name in allowed if name in kept)
