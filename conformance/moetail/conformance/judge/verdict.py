"""What the judge says: for each output, which elements no legal evaluation could have produced."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moetail.conformance.judge.rounding import bf16_bits

First = tuple[tuple[int, ...], float, float, float]


@dataclass(frozen=True)
class OutputVerdict:
    """The verdict on one output of one rank.

    ``got``, ``lo`` and ``hi`` are BF16 [T, H], on the device of the result: what was returned, and
    the least and the greatest admissible value. Both are NaN where NaN is due, and -inf and +inf
    where the element is not judged. ``got`` is None where ``structure`` is set: a sentence on what
    is wrong with the output as a whole, all of whose elements then count as wrong.
    """

    rank: int
    name: str
    judged: int
    not_judged: int
    ambiguous: int
    wrong: int
    wrong_mask: Tensor
    structure: str | None = None
    got: Tensor | None = None
    lo: Tensor | None = None
    hi: Tensor | None = None

    @property
    def conforms(self) -> bool:
        return self.structure is None and self.wrong == 0

    @property
    def first(self) -> First | None:
        """Index, value, and the least and greatest admissible value of the first wrong element."""
        if self.got is None or self.lo is None or self.hi is None or self.wrong == 0:
            return None
        index = tuple(int(i) for i in self.wrong_mask.nonzero()[0])
        return index, float(self.got[index]), float(self.lo[index]), float(self.hi[index])

    def describe(self) -> str:
        """One line: ``hidden[3, 17] = 0x3f81 (1.0078125); admissible: 0x3f80 (1.0)``."""
        if self.structure is not None:
            return self.structure
        if self.first is None:
            return f"{self.name}: {self.judged} elements conform"
        index, got, lo, hi = self.first
        place = ", ".join(str(i) for i in index)
        return f"{self.name}[{place}] = {_shown(got)}; admissible: {_range(lo, hi)}"


@dataclass(frozen=True)
class Verdict:
    """The verdict on one operation: one :class:`OutputVerdict` a rank and output name."""

    operation: str
    outputs: tuple[OutputVerdict, ...]

    @property
    def conforms(self) -> bool:
        return self.first is None

    @property
    def judged(self) -> int:
        """Elements for which something is required."""
        return sum(output.judged for output in self.outputs)

    @property
    def not_judged(self) -> int:
        """Elements whose class depends on a legal choice of the implementation."""
        return sum(output.not_judged for output in self.outputs)

    @property
    def ambiguous(self) -> int:
        """Judged elements with more than one admissible value."""
        return sum(output.ambiguous for output in self.outputs)

    @property
    def wrong(self) -> int:
        return sum(output.wrong for output in self.outputs)

    @property
    def first(self) -> OutputVerdict | None:
        """The first output that does not conform."""
        return next((output for output in self.outputs if not output.conforms), None)

    def describe(self) -> str:
        """The first fault in one line, with its rank where there are several."""
        if self.first is None:
            return f"{self.operation}: {self.judged} elements conform"
        several = len({output.rank for output in self.outputs}) > 1
        where = f"rank {self.first.rank}: " if several else ""
        return where + self.first.describe()


def _range(lo: float, hi: float) -> str:
    if lo == hi or lo != lo:
        return _shown(lo)
    return f"{_shown(lo)}..{_shown(hi)}"


def _shown(value: float) -> str:
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return f"{value:+}"
    return f"{bf16_bits(torch.tensor(value)):#06x} ({value!r})"
