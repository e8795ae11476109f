"""What a mutant is, what a legal variant is, and the register that this package's modules fill.

Both are the reference with a change, in their own operations only: an edit of the contract, which
is a function that takes a contract and gives another, or a behaviour, a class over the reference.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from moetail.reference import Reference
from moetail.spec import BEAM, OPERATIONS, Contract, Operation, rule

__all__ = [
    "CATALOGUE",
    "Change",
    "Edit",
    "Mutant",
    "Variant",
    "breaks",
    "changed",
    "edited",
    "legal",
]

Edit: TypeAlias = Callable[[Contract], Contract]
Values: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Change:
    """The reference changed.

    Attributes:
        id: such as ``"scale-before-rounding"``.
        sentence: what it does, in words.
        operations: the operations that it can change; all others are the reference's.
        made: the edit or the behaviour, as it is written.
        when: says of a call's values, by role, whether an edit holds for it; None: for every call.
    """

    id: str
    sentence: str
    operations: tuple[str, ...]
    made: Edit | type[Reference]
    when: Callable[[Values], bool] | None = None

    @property
    def edit(self) -> Edit | None:
        """The edit of the contract; None where it is a behaviour."""
        return None if isinstance(self.made, type) else self.made

    @property
    def attribute(self) -> str:
        """The name under which the package offers an instance."""
        return self.id.replace("-", "_")

    @property
    def name(self) -> str:
        """The name by which any process loads it."""
        return f"moetail.conformance.catalogue:{self.attribute}"

    @functools.cached_property
    def implementation(self) -> type[Reference]:
        """The class; an instance of it is an implementation of the API."""
        plain = Reference()
        others = [item.name for item in OPERATIONS if item.name not in self.operations]
        unchanged = {name: getattr(plain, name) for name in others}
        return type(self.attribute, (changed(self),), unchanged)


@dataclass(frozen=True)
class Mutant(Change):
    """A change that breaks a rule.

    Attributes:
        rule: id of the rule that it breaks, the first that a report must name.
        source: the public report of such a bug, if it is one.
        also: further rules that it breaks, in honest reading.
        shows: whether the results of one call, on its arguments alone, show it.
    """

    rule: str = ""
    source: str | None = None
    also: tuple[str, ...] = ()
    shows: bool = True


@dataclass(frozen=True)
class Variant(Change):
    """A change that the contract leaves free."""


# --- changes in one class -------------------------------------------------------------------------


class _Edited(Reference):
    """The reference with edits of its contract, each for the calls that it holds for."""

    edits: tuple[Change, ...] = ()

    def checked(self, item: Operation, call: dict[str, Any]) -> dict[str, Any]:
        values = super().checked(item, call)
        held = (edit for edit in self.edits if edit.when is None or edit.when(values))
        return {**values, "contract": edited(*held)}

    def contract_of(self, values: Values) -> Contract:
        contract: Contract = values["contract"]
        return contract


@functools.cache
def edited(*changes: Change) -> Contract:
    """The contract with the edits of changes, one after the other; behaviours leave it.

    Raises:
        KeyError, ValueError: one finds nothing that it could edit after those before it.
    """
    edits = (item.edit for item in changes if item.edit is not None)
    return functools.reduce(lambda contract, edit: edit(contract), edits, BEAM)


def changed(*changes: Change) -> type[Reference]:
    """The reference with changes, in every operation.

    Raises:
        TypeError: behaviours of which no one class can be made.
    """
    edits = tuple(item for item in changes if item.edit is not None)
    behaviours = [item.made for item in changes if isinstance(item.made, type)]
    bases = (*behaviours, _Edited) if edits else tuple(behaviours)
    return type("And".join(item.attribute for item in changes), bases, {"edits": edits})


# --- the register ---------------------------------------------------------------------------------

CATALOGUE: dict[str, Change] = {}

_Made = TypeVar("_Made", bound="Edit | type[Reference]")


def breaks(
    rule_id: str,
    *,
    source: str | None = None,
    operations: tuple[str, ...] | None = None,
    also: tuple[str, ...] = (),
    when: Callable[[Values], bool] | None = None,
    shows: bool = False,
) -> Callable[[_Made], _Made]:
    """Registers an edit or a behaviour as a mutant: its name is the id, its docstring the sentence.

    ``operations`` are the rule's own unless given. An edit always shows.
    """
    broken = rule(rule_id)

    def register(made: _Made) -> _Made:
        applies = broken.operations if operations is None else operations
        seen = shows or not isinstance(made, type)
        further = tuple(rule(other).id for other in also)
        _add(Mutant(*_named(made), applies, made, when, broken.id, source, further, seen))
        return made

    return register


def legal(
    *operations: str, when: Callable[[Values], bool] | None = None
) -> Callable[[_Made], _Made]:
    """Registers an edit or a behaviour as a variant, as :func:`breaks` does a mutant."""

    def register(made: _Made) -> _Made:
        _add(Variant(*_named(made), operations, made, when))
        return made

    return register


def _named(made: Edit | type[Reference]) -> tuple[str, str]:
    """The id and the sentence."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|_", "-", made.__name__)
    return words.lower(), " ".join(inspect.cleandoc(made.__doc__ or "").split())


def _add(item: Change) -> None:
    if item.id in CATALOGUE:
        raise ValueError(f"two changes are called {item.id}")
    CATALOGUE[item.id] = item
