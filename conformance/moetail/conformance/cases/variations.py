"""Changes to a case's arguments by name: some must be refused, the others must not matter."""

from __future__ import annotations

from moetail.conformance.cases.case import Arguments, Case
from moetail.conformance.cases.refusals import refusals
from moetail.conformance.cases.rewrites import REWRITES, Change

__all__ = ["apply", "find"]


def find(name: str, case: Case) -> Change:
    """The variation of that name; ValueError where the case's operation has none."""
    known = REWRITES | {item.name: item.change for item in refusals(case.operation)}
    if name not in known:
        allowed = ", ".join(known)
        raise ValueError(f"variation: {name!r}; known for {case.operation}: {allowed}")
    return known[name]


def apply(name: str, case: Case, rank: int, arguments: Arguments) -> Arguments:
    """The arguments of a case on a rank, changed by the variation of that name."""
    return find(name, case)(case, rank, arguments)
