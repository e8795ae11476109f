"""What the page, the summary and the badge say alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from moetail.conformance.catalogue import MUTANTS, Mutant
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
from moetail.spec.rules import OPERATIONS, RULES, operation

__all__ = [
    "broken_rules",
    "cell_mark",
    "diagnosis",
    "extent",
    "headline",
    "named_deviations",
    "not_judged_reasons",
    "raised_before",
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
    """(reason, the rules with their operations, number of cases) of what was not decided."""
    places: dict[str, dict[str, dict[str, None]]] = {}
    cases: dict[str, int] = {}

    def add(reason: str, rule_id: str, name: str) -> None:
        places.setdefault(reason, {}).setdefault(rule_id, {})[operation(name).short] = None

    for trial in results.trials:
        if trial.status == NOT_JUDGED:
            add(trial.found, trial.rule, trial.operation)
            cases[trial.found] = cases.get(trial.found, 0) + 1
    for rule_id, row in results.matrix().items():
        for name, cell in row.items():
            if cell.status == NOT_JUDGED and not cell.trials and results.planned:
                early = len(results.trials) < results.planned
                why = "the run ended before" if early else "no case of this plan tries it"
                add(why, rule_id, name)
    return [
        (
            reason,
            [f"{rule_id} of {', '.join(names)}" for rule_id, names in named.items()],
            cases.get(reason, 0),
        )
        for reason, named in places.items()
    ]


def raised_before(
    violations: Iterable[TrialResult],
) -> Iterator[tuple[TrialResult, TrialResult | None]]:
    """Violations, each with an earlier one that raised in the same place."""
    seen: dict[str, TrialResult] = {}
    for violation in violations:
        # The last line has the exception's text, which may differ from call to call.
        place = "\n".join(line for line in violation.trace.splitlines() if line.startswith(" "))
        yield violation, seen.get(place)
        if place:
            seen.setdefault(place, violation)


def diagnosis(trial: TrialResult) -> str:
    """``scale-before-rounding (ROUND-2) explains all of 1,234 wrong elements``, or so; "" where
    nothing was diagnosed."""
    if not trial.wrong:
        return ""
    if not trial.deviations:
        return "no known deviation explains it"
    named = " and ".join(f"{item.id} ({item.rule})" for item in named_deviations(trial))
    verb = "explains" if len(trial.deviations) == 1 else "together explain"
    share = "all" if trial.explained == 1.0 else f"{100 * trial.explained:.3g}%"
    return f"{named} {verb} {share} of {count(trial.wrong, 'wrong element')}"


def named_deviations(trial: TrialResult) -> list[Mutant]:
    """The mutants that a diagnosis names."""
    known = {item.id: item for item in MUTANTS}
    return [known[name] for name in trial.deviations]
