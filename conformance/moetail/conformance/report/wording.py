"""What the page, the summary and the badge say alike."""

from __future__ import annotations

from moetail.conformance.catalogue import Change, change
from moetail.conformance.run.results import (
    CONFORMS,
    NOT_DECIDED,
    NOT_JUDGED,
    VIOLATES,
    Cell,
    Results,
    TrialResult,
    count,
)
from moetail.spec.rules import OPERATIONS, RULES

__all__ = [
    "broken_rules",
    "cell_mark",
    "extent",
    "headline",
    "named_deviations",
    "not_judged_reasons",
]


def broken_rules(results: Results) -> list[str]:
    """The rules that are violated, the one that is believed first in front."""
    return list(dict.fromkeys(violation.rule for violation in results.violations))


def headline(results: Results) -> str:
    """The verdict in a few words."""
    if results.verdict == CONFORMS:
        return "Conforms"
    if results.verdict == NOT_JUDGED:
        return "Nothing was judged"
    if results.verdict == NOT_DECIDED:
        return "The run was not completed"
    return f"Violates {', '.join(broken_rules(results))}"


def extent(results: Results) -> str:
    """How much of the contract a run looked at, "" where it was all of it."""
    parts = []
    judged = [name for name in results.provided if results.asked(name)]
    if len(judged) < len(OPERATIONS):
        parts.append(f"{len(judged)} of {count(len(OPERATIONS), 'operation')}")
    if results.rules:
        parts.append(f"{len(results.rules)} of {count(len(RULES), 'rule')}")
    return ", ".join(parts)


def cell_mark(cell: Cell) -> str:
    """A cell of the matrix as a sign and a number of cases."""
    if cell.status == VIOLATES:
        return f"✗ {cell.violations} of {cell.trials}"
    if cell.status == CONFORMS:
        return f"✓ {cell.trials}"
    return "?" if cell.status == NOT_JUDGED else "–"


def not_judged_reasons(results: Results) -> list[tuple[str, list[str], int]]:
    """(reason, the rules and operations, number of cases) of what could not be decided."""
    places: dict[str, dict[str, None]] = {}
    cases: dict[str, int] = {}
    for trial in results.trials:
        if trial.status == NOT_JUDGED:
            places.setdefault(trial.found, {})[f"{trial.rule} {trial.operation}"] = None
            cases[trial.found] = cases.get(trial.found, 0) + 1
    return [(reason, list(named), cases[reason]) for reason, named in places.items()]


def named_deviations(trial: TrialResult) -> list[Change]:
    """The entries of the catalogue that a diagnosis names."""
    return [change(name) for name in trial.deviations]
