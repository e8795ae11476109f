"""The judge: could a legal evaluation of the contract have produced this output?

It holds no reference result and no tolerance. From the arguments of a call it computes, for every
element, a set of values that contains all that legal evaluations can give: any order of the FP32
sums, FMA or not, flush-to-zero or not, an inverse RMS within its permitted 2^-16. An element
outside its set is wrong, whoever computed it; one inside is accepted. The modules give the proof,
each for its part, in this order:

    rounding    RN into BF16 and FP32; monotone, so sets are followed by their endpoints
    admissible  the set: an interval, NaN, or free (not judged)
    summation   FP32 sums in any order: three bounds, the last of them exact
    stages      reduce, round, scale, shared, all-reduce, residual
    norm        post and next
    operations  which stages an operation chains
    verdict     what is reported

Errors are not counted twice: ``normalized`` is judged from the implementation's own ``hidden``.

Not judged, and counted as such: an element that some legal evaluations make NaN and others do not
(orders that overflow both ways, a subnormal times infinity), and a row whose norm depends on such
an element, or on one that may be infinite, or whose mean square may be flushed to zero.
Accepted though perhaps not reachable: values strictly inside an interval; what bound 1 of
``summation`` admits beyond the reach of orders, where more than eight terms cancel; and elements of
a row that no single inverse RMS explains together, each being judged by itself. That ranks agree
bit for bit is not arithmetic, and not looked at here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moetail.conformance.judge.admissible import Admissible
from moetail.conformance.judge.norm import admit_norm
from moetail.conformance.judge.operations import OPERATIONS, SEVERAL_RANKS, Chain
from moetail.conformance.judge.rounding import round_bf16
from moetail.conformance.judge.stages import (
    admit_rank_sum,
    admit_reduction,
    admit_residual,
    admit_round,
    admit_scale,
    admit_shared,
)
from moetail.conformance.judge.verdict import OutputVerdict, Verdict

__all__ = [
    "Admissible",
    "OutputVerdict",
    "Verdict",
    "admit_norm",
    "admit_rank_sum",
    "admit_reduction",
    "admit_residual",
    "admit_round",
    "admit_scale",
    "admit_shared",
    "judge",
    "round_bf16",
]

CHUNK_TERMS = 1 << 22
"""Float64 terms taken at once: 32 MiB for each temporary of the reduction."""


def judge(
    operation: str,
    calls: Sequence[Mapping[str, Any]],
    results: Sequence[Any],
    *,
    chunk_terms: int = CHUNK_TERMS,
) -> Verdict:
    """Judges what an operation returned.

    Args:
        operation: its name in the API. The two that only rearrange tensors have no arithmetic to
            judge, and are a ValueError here.
        calls: each rank's arguments by name, with the values they had before the call. Defaults
            may be left out; ``workspace`` and ``strategy`` are not looked at; of
            ``beam_moe_finalize``'s ``output`` only the shape is.
        results: what each rank returned.
        chunk_terms: bounds the memory; it changes no verdict.
    """
    if operation not in OPERATIONS:
        raise ValueError(f"{operation!r} is not judged by its arithmetic: {', '.join(OPERATIONS)}")
    if not calls or len(calls) != len(results):
        raise ValueError(f"{len(calls)} calls and {len(results)} results: expected one a rank")
    if len(calls) > 1 and operation not in SEVERAL_RANKS:
        raise ValueError(f"{operation} runs on one rank: {len(calls)} calls were given")
    chain = OPERATIONS[operation](calls)
    outputs = [_outputs(chain, rank, result) for rank, result in enumerate(results)]
    tokens = chain.shape[0]
    step = max(1, chunk_terms // max(1, chain.terms))
    for start in range(0, tokens, step):
        stop = min(start + step, tokens)
        sets = chain.admit(start, stop)
        for rank, admissible in enumerate(sets):
            first = outputs[rank][0]
            # Replicas are alike, as a rule: the same bits for the same sets are looked at once.
            before = outputs[rank - 1] if rank and admissible is sets[rank - 1] else None
            if before is not None and not first.repeats(before[0], start, stop):
                before = None
            if before is None:
                first.compare(admissible, start, stop)
            if not chain.next_norms:
                continue
            weight, eps = chain.next_norms[rank]
            second = outputs[rank][1]
            if (
                before is not None
                and chain.same_next_norm(rank, rank - 1)
                and second.repeats(before[1], start, stop)
            ):
                continue
            if eps is not None and second.wanted:
                # Anchored on what was returned; where nothing usable was, on what should have been.
                hidden = first.got
                anchor = admissible if hidden is None else Admissible.of(hidden[start:stop])
                second.compare(admit_norm(anchor, weight, eps), start, stop)
    return Verdict(
        operation,
        tuple(output.verdict() for rank in outputs for output in rank if output.reported),
    )


class _Output:
    """One output of one rank while its chunks are judged."""

    def __init__(self, chain: Chain, rank: int, name: str, value: Any, fault: str | None) -> None:
        self.rank, self.name, self.shape, self.device = rank, name, chain.shape, chain.device
        self.wanted = name != "normalized" or chain.next_norms[rank][1] is not None
        self.structure = fault or self._structure(value)
        self.reported = self.wanted or self.structure is not None
        self.got: Tensor | None = None
        if self.structure is None and isinstance(value, Tensor):
            self.got = value
        self.lo = torch.empty(self.shape, dtype=torch.bfloat16, device=self.device)
        self.hi = torch.empty_like(self.lo)
        self.wrong = torch.zeros(self.shape, dtype=torch.bool, device=self.device)
        self.judged = self.ambiguous = 0
        self._last = (0, 0)  # judged and ambiguous of the last tokens

    def _structure(self, value: Any) -> str | None:
        name = self.name
        if not self.wanted:
            if value is None:
                return None
            return f"{name} is {_kind(value)}, but next_eps was not given"
        if value is None and name == "normalized":
            return f"{name} is None, but next_eps was given"
        if not isinstance(value, Tensor):
            return f"{name} is {_kind(value)}, not a tensor"
        if tuple(value.shape) != self.shape:
            return f"{name} has shape {list(value.shape)}, not {list(self.shape)}"
        if value.dtype is not torch.bfloat16:
            return f"{name} is {value.dtype}, not torch.bfloat16"
        if value.device != self.device:
            return f"{name} is on {value.device}, not {self.device}"
        return None

    def compare(self, admissible: Admissible, start: int, stop: int) -> None:
        """Judges tokens [start, stop)."""
        lo, hi = admissible.lo, admissible.hi
        judged, ambiguous = lo.numel(), 0
        if hi is not lo:
            ambiguous = int((lo != hi).sum())
        if admissible.nan is not None:
            lo = lo.masked_fill(admissible.nan, float("nan"))
            hi = hi.masked_fill(admissible.nan, float("nan"))
        if admissible.free is not None:
            lo = lo.masked_fill(admissible.free, float("-inf"))
            hi = hi.masked_fill(admissible.free, float("inf"))
            judged -= int(admissible.free.sum())
        # Endpoints are BF16 values already: the conversion is exact.
        self.lo[start:stop], self.hi[start:stop] = lo, hi
        self._count(judged, ambiguous)
        if self.got is None:
            self.wrong[start:stop] = True
        else:
            self.wrong[start:stop] = ~admissible.admits(self.got[start:stop])

    def repeats(self, other: _Output, start: int, stop: int) -> bool:
        """Takes over what was found of ``other``'s tokens [start, stop), if these have its bits.

        To be asked only where both have the same sets.
        """
        if self.got is None or other.got is None:
            return False
        mine, theirs = (got[start:stop].view(torch.int16) for got in (self.got, other.got))
        if not torch.equal(mine, theirs):
            return False
        for name in ("lo", "hi", "wrong"):
            getattr(self, name)[start:stop] = getattr(other, name)[start:stop]
        self._count(*other._last)
        return True

    def _count(self, judged: int, ambiguous: int) -> None:
        self._last = (judged, ambiguous)
        self.judged += judged
        self.ambiguous += ambiguous

    def verdict(self) -> OutputVerdict:
        elements = self.wrong.numel()
        structural = self.structure is not None
        if structural:
            self.wrong.fill_(True)
            self.judged = elements
        wrong = max(1, elements) if structural else int(self.wrong.sum())
        return OutputVerdict(
            rank=self.rank,
            name=self.name,
            judged=self.judged,
            not_judged=elements - self.judged,
            ambiguous=self.ambiguous,
            wrong=wrong,
            wrong_mask=self.wrong,
            structure=self.structure,
            got=self.got,
            lo=None if structural else self.lo,
            hi=None if structural else self.hi,
        )


def _outputs(chain: Chain, rank: int, result: Any) -> list[_Output]:
    if len(chain.names) == 1:
        return [_Output(chain, rank, chain.names[0], result, None)]
    if isinstance(result, (tuple, list)) and len(result) == len(chain.names):
        pairs = zip(chain.names, result, strict=True)
        return [_Output(chain, rank, name, value, None) for name, value in pairs]
    fault = f"the result is {_kind(result)}, not a pair (hidden, normalized)"
    return [_Output(chain, rank, name, None, fault) for name in chain.names]


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return "a tensor"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return repr(value) if value is None else f"a {type(value).__name__}"
