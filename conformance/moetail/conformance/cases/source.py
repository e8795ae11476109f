"""What a source of values is, and which there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moetail.conformance.cases.problem import Problem

__all__ = ["SOURCES", "Source"]


@dataclass(frozen=True)
class Source:
    """A named way to make the values of a case.

    Attributes:
        name: the key in SOURCES.
        description: one line.
        make: the values of a case.
        rule: the rule that decides on these values, or None for a general source.
        refuse: why the source can not serve a case, or None where it can.
        options: those of cases in which it shows most, tried in turn.
    """

    name: str
    description: str
    make: Callable[[Any], Problem]
    rule: str | None = None
    refuse: Callable[[Any], str | None] = lambda case: None
    options: tuple[Mapping[str, Any], ...] = ({},)


SOURCES: dict[str, Source] = {}
"""By name, as :mod:`.sources` puts them there: the general ones, then those aimed at a rule."""
