"""The judge: could a legal evaluation of the contract have produced this output?

It holds no reference result and no tolerance. From the arguments of a call it computes, for every
element, a set of values that contains all that legal evaluations can give: any order of the FP32
sums, FMA or not, flush-to-zero or not, an inverse RMS within its permitted 2^-16. An element
outside its set is wrong, whoever computed it; one inside is accepted. The modules give the proof,
each for its part, in this order:

    rounding     into the formats of a contract; monotone, so sets are followed by their endpoints
    admissible   the set: an interval, NaN, or free (not judged); its rounding
    summation    FP32 sums in any order: three bounds, the last of them exact
    elementwise  products and sums of two values, with FMA or without
    reduction    the sums over routes and over ranks
    norm         the inverse RMS of a row, and the elements
    program      the steps of a contract, in order
    verdict      what is reported

Errors are not counted twice: ``normalized`` is judged from the implementation's own ``hidden``.
All this is for any contract whose steps are known; unless another is named it is Beam's.

Not judged, and counted as such: an element that some legal evaluations make NaN and others do not
(orders that overflow both ways, a subnormal times infinity), and a row whose norm depends on such
an element, or on one that may be infinite, or whose mean square may be flushed to zero.
Accepted though perhaps not reachable: values strictly inside an interval; what bound 1 of
``summation`` admits beyond the reach of orders, where more than eight terms cancel, or where a
contract rounds the sum only after more has happened to it; and elements of a row that no single
inverse RMS explains together, each being judged by itself. That ranks agree bit for bit is not
arithmetic, and not looked at here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moetail.conformance.judge.admissible import Admissible, rounded
from moetail.conformance.judge.elementwise import add, multiply
from moetail.conformance.judge.norm import affine, inverse_rms
from moetail.conformance.judge.program import Program
from moetail.conformance.judge.reduction import sum_ranks, weighted_sum
from moetail.conformance.judge.rounding import round_bf16
from moetail.conformance.judge.verdict import OutputVerdict, Verdict
from moetail.spec import BEAM, OPERATIONS, Contract, Operation
from moetail.spec.operations import operation as find_operation

__all__ = [
    "Admissible",
    "OutputVerdict",
    "Verdict",
    "add",
    "affine",
    "inverse_rms",
    "judge",
    "multiply",
    "round_bf16",
    "rounded",
    "sum_ranks",
    "weighted_sum",
]

CHUNK_TERMS = 1 << 22
"""Float64 terms taken at once: 32 MiB for each temporary of the reduction."""


def judge(
    operation: str | Operation,
    calls: Sequence[Mapping[str, Any]],
    results: Sequence[Any],
    *,
    contract: Contract = BEAM,
    chunk_terms: int = CHUNK_TERMS,
) -> Verdict:
    """Judges what an operation returned.

    Args:
        operation: one of the API, or its name. Those that only rearrange tensors have no arithmetic
            to judge, and are a ValueError here.
        calls: each rank's arguments by name, with the values they had before the call. Defaults
            may be left out; ``workspace`` and ``strategy`` are not looked at; of
            ``beam_moe_finalize``'s ``output`` only the shape is.
        results: what each rank returned.
        contract: whose arithmetic is due. A ValueError names the step of which no sets are known.
        chunk_terms: bounds the memory; it changes no verdict.
    """
    item = find_operation(operation)
    if not item.computes:
        computing = ", ".join(other.name for other in OPERATIONS if other.computes)
        raise ValueError(f"{item.name!r} is not judged by its arithmetic: {computing}")
    if not calls or len(calls) != len(results):
        raise ValueError(f"{len(calls)} calls and {len(results)} results: expected one a rank")
    if len(calls) > 1 and not item.distributed:
        raise ValueError(f"{item.name} runs on one rank: {len(calls)} calls were given")
    program = Program(contract, item, calls)
    outputs = [_outputs(program, rank, result) for rank, result in enumerate(results)]
    tokens = program.shape[0]
    step = max(1, chunk_terms // max(1, program.terms))
    for start in range(0, tokens, step):
        stop = min(start + step, tokens)
        values = program.values(start, stop)
        for rank, mine in enumerate(outputs):
            # Replicas are alike, as a rule: the same bits for the same sets are looked at once.
            alike = rank > 0 and values[rank] is values[rank - 1]
            returned: dict[str, Tensor] = {}
            for place, output in enumerate(mine):
                alike = alike and output.repeats(outputs[rank - 1][place], start, stop)
                if output.wanted and not alike:
                    output.compare(values[rank].output(output.step, returned), start, stop)
                # What is computed from it is judged from what was returned; where nothing usable
                # was, from what should have been.
                if output.got is not None:
                    returned[output.step] = output.got[start:stop]
    return Verdict(
        item.name,
        tuple(output.verdict() for rank in outputs for output in rank if output.reported),
    )


class _Output:
    """One output of one rank while its chunks are judged."""

    def __init__(
        self, program: Program, rank: int, place: int, value: Any, fault: str | None
    ) -> None:
        output, self.step = program.outputs[place]
        self.rank, self.name, self.needs = rank, output.name, output.needs
        self.shape, self.device = program.shape, program.device
        self.wanted = program.wants(output.needs, rank)
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
            return f"{name} is {_kind(value)}, but {self.needs} was not given"
        if value is None and self.needs:
            return f"{name} is None, but {self.needs} was given"
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


def _outputs(program: Program, rank: int, result: Any) -> list[_Output]:
    several = len(program.outputs)
    if several == 1:
        return [_Output(program, rank, 0, result, None)]
    if isinstance(result, (tuple, list)) and len(result) == several:
        return [_Output(program, rank, place, value, None) for place, value in enumerate(result)]
    names = ", ".join(output.name for output, _ in program.outputs)
    fault = f"the result is {_kind(result)}, not a pair ({names})"
    return [_Output(program, rank, place, None, fault) for place in range(several)]


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return "a tensor"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return repr(value) if value is None else f"a {type(value).__name__}"
