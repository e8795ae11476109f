"""The catalogue of mutants: implementations that each break one rule.

A suite is worth what it rejects, so every mutant must be rejected, and by the rule it breaks. Most
are public bugs; the others fill in the kinds around them. ``MUTANTS`` is in the contract's order of
stages. Any process loads one as ``"moetail.conformance.catalogue:scale_before_rounding"``: each is
an attribute of this package, an instance of its class.
"""

from __future__ import annotations

import functools

from moetail.conformance.catalogue import (
    conversions,
    execution,
    norms,
    ranks,
    reduction,
    refusals,
    residual,
    routing,
)
from moetail.conformance.catalogue.mutant import CATALOGUE, Mutant
from moetail.reference import Reference
from moetail.spec import RULES

__all__ = ["MUTANTS", "Mutant", "mutant"]

_MODULES = (conversions, routing, reduction, norms, residual, ranks, refusals, execution)
_ORDER = [rule.id for rule in RULES]

MUTANTS: tuple[Mutant, ...] = tuple(
    sorted(CATALOGUE.values(), key=lambda made: _ORDER.index(made.rule))
)


def mutant(mutant_id: str) -> Mutant:
    """The mutant of that id; a KeyError that lists the ids where there is none."""
    if mutant_id not in CATALOGUE:
        raise KeyError(f"no mutant {mutant_id!r}; there are {', '.join(sorted(CATALOGUE))}")
    return CATALOGUE[mutant_id]


@functools.cache
def _instance(mutant_id: str) -> Reference:
    return mutant(mutant_id).implementation()


def __getattr__(name: str) -> Reference:
    mutant_id = name.replace("_", "-")
    if mutant_id not in CATALOGUE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _instance(mutant_id)
