"""The catalogue: implementations that each break one rule, and legal ones that differ in bits.

A suite is worth what it rejects, so every mutant must be rejected, and by the rule it breaks; and
what it accepts, so no variant may be. Most mutants are public bugs; the others fill in the kinds
around them. ``MUTANTS`` is in the contract's order of stages, edits before behaviours. Any process
loads one as ``"moetail.conformance.catalogue:scale_before_rounding"``: each is an attribute of this
package, an instance of its class.
"""

from __future__ import annotations

import functools

from moetail.conformance.catalogue import (  # noqa: F401 - they fill the register
    arithmetic,
    conversions,
    edits,
    execution,
    ranks,
    refusals,
    routing,
    variants,
)
from moetail.conformance.catalogue.change import CATALOGUE, Change, Mutant, Variant, changed, edited
from moetail.reference import Reference
from moetail.spec import RULES

__all__ = ["MUTANTS", "VARIANTS", "Change", "Mutant", "Variant", "change", "changed", "edited"]

_ORDER = [rule.id for rule in RULES]

MUTANTS: tuple[Mutant, ...] = tuple(
    sorted(
        (item for item in CATALOGUE.values() if isinstance(item, Mutant)),
        key=lambda item: (_ORDER.index(item.rule), item.edit is None),
    )
)
VARIANTS = tuple(item for item in CATALOGUE.values() if isinstance(item, Variant))


def change(change_id: str) -> Change:
    """The mutant or variant of that id; a KeyError that lists the ids where there is none."""
    if change_id not in CATALOGUE:
        raise KeyError(f"no change {change_id!r}; there are {', '.join(sorted(CATALOGUE))}")
    return CATALOGUE[change_id]


@functools.cache
def _instance(change_id: str) -> Reference:
    return change(change_id).implementation()


def __getattr__(name: str) -> Reference:
    change_id = name.replace("_", "-")
    if change_id not in CATALOGUE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _instance(change_id)
