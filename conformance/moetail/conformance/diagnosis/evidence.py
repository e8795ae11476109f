"""What a diagnosis looks at: an implementation's outputs, what is admissible, and what is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moetail.conformance.cases.cut import choose, cut_call
from moetail.conformance.cases.tensors import mapped
from moetail.conformance.judge import Verdict
from moetail.spec import Operation

__all__ = ["MOST_TERMS", "Evidence", "evidence_of"]

MOST_TERMS = 1 << 20
"""Larger calls are cut to their first wrong tokens, and as many others."""

_Call = Mapping[str, Any]


@dataclass
class _Seen:
    """One output of one rank."""

    rank: int
    place: int
    got: Tensor
    lo: Tensor
    hi: Tensor
    wrong: Tensor

    def match(self, results: Sequence[Any]) -> tuple[int, int]:
        """(wrong elements with the bits that were found, right elements that are right)."""
        value = results[self.rank]
        value = value[self.place] if isinstance(value, (tuple, list)) else value
        if not isinstance(value, Tensor) or value.shape != self.got.shape:
            return 0, 0
        same = (value == self.got) | (value.isnan() & self.got.isnan())
        admitted = same | ((self.lo <= value) & (value <= self.hi))
        return int((same & self.wrong).sum()), int((admitted & ~self.wrong).sum())


@dataclass(frozen=True)
class Evidence:
    """One call of an operation on the CPU, and what the judge said of its elements.

    Attributes:
        operation: that was called.
        calls: each rank's arguments, without its workspace.
        wrong, right: numbers of elements.
    """

    operation: Operation
    calls: Sequence[_Call]
    wrong: int
    right: int
    _seen: Sequence[_Seen]

    def match(self, results: Sequence[Any]) -> tuple[int, float]:
        """(wrong elements with the bits that were found, share of right ones that are right), of
        what an explanation gives on each rank."""
        matches = [item.match(results) for item in self._seen]
        explained, right = (sum(part) for part in zip(*matches, strict=True))
        return explained, right / self.right if self.right else 1.0


def evidence_of(item: Operation, calls: Sequence[_Call], verdict: Verdict) -> Evidence:
    """The evidence of a verdict; of a large call, of some of its tokens."""
    places = [output.name for output in item.outputs]
    seen = []
    for output in verdict.outputs:
        if output.got is not None and output.lo is not None and output.hi is not None:
            parts = (output.got, output.lo, output.hi, output.wrong_mask)
            seen.append(_Seen(output.rank, places.index(output.name), *(x.cpu() for x in parts)))
    kept = _cut(item, mapped(list(calls), Tensor.cpu), seen) if seen else calls
    wrong = sum(int(each.wrong.sum()) for each in seen)
    return Evidence(item, kept, wrong, sum(each.wrong.numel() for each in seen) - wrong, seen)


def _cut(
    item: Operation, calls: Sequence[_Call], seen: Sequence[_Seen]
) -> Sequence[Mapping[str, Any]]:
    """A large call, and what was seen of it, cut to its first wrong tokens and as many others."""
    weights = item.find("weights")
    given = weights.of(calls[0]) if weights else None
    tokens, hidden_size = seen[0].got.shape
    ranks = 1 if item.owns else len(calls)
    terms = ranks * tokens * hidden_size * (1 if given is None else given.shape[1])
    if terms <= MOST_TERMS:
        return calls
    wrong = torch.stack([each.wrong.any(dim=1) for each in seen]).any(dim=0)
    most = max(1, tokens * MOST_TERMS // terms)
    chosen = torch.cat([wrong.nonzero()[: (most + 1) // 2], (~wrong).nonzero()[: most // 2]])
    kept = choose(item.name, chosen.flatten().tolist(), tokens, len(calls))
    for each in seen:
        for name in ("got", "lo", "hi", "wrong"):
            setattr(each, name, getattr(each, name)[kept])
    return [cut_call(item.name, call, kept, rank, len(calls)) for rank, call in enumerate(calls)]
