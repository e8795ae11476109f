"""What a mutant is, and the register that the modules of this package fill."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from moetail.reference import Reference
from moetail.spec import rule

__all__ = ["CATALOGUE", "Mutant", "breaks"]


@dataclass(frozen=True)
class Mutant:
    """The reference with one stage, or one operation's step, replaced by a broken one.

    Attributes:
        id: such as ``"scale-before-rounding"``.
        rule: id of the rule that it breaks, the first that a report must name.
        sentence: what it does, in words.
        operations: the operations that it can change.
        implementation: the class; an instance of it is an implementation of the API.
        source: the public report of such a bug, if it is one.
        also: further rules that it breaks, in honest reading.
    """

    id: str
    rule: str
    sentence: str
    operations: tuple[str, ...]
    implementation: type[Reference]
    source: str | None = None
    also: tuple[str, ...] = ()

    @property
    def attribute(self) -> str:
        """The name under which the package offers an instance."""
        return self.id.replace("-", "_")

    @property
    def name(self) -> str:
        """The name by which any process loads it."""
        return f"moetail.conformance.catalogue:{self.attribute}"


CATALOGUE: dict[str, Mutant] = {}

_Implementation = TypeVar("_Implementation", bound=type[Reference])


def breaks(
    rule_id: str,
    *,
    source: str | None = None,
    operations: tuple[str, ...] | None = None,
    also: tuple[str, ...] = (),
) -> Callable[[_Implementation], _Implementation]:
    """Registers a class as a mutant: its name is the id, its docstring the sentence.

    ``operations`` are the rule's own unless given.
    """
    broken = rule(rule_id)

    def register(implementation: _Implementation) -> _Implementation:
        name = implementation.__name__
        made = Mutant(
            re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", name).lower(),
            broken.id,
            " ".join(inspect.cleandoc(implementation.__doc__ or "").split()),
            broken.operations if operations is None else operations,
            implementation,
            source,
            tuple(rule(other).id for other in also),
        )
        if made.id in CATALOGUE:
            raise ValueError(f"two mutants are called {made.id}")
        CATALOGUE[made.id] = made
        return implementation

    return register
