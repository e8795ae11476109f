"""The steps of a contract, walked on admissible sets.

A step of a stage that the operation does not have, and one without the argument that it needs, is
the identity on its first argument. Steps without a rounding between them need no care here: a value
that is not rounded is a set of FP32 numbers, and one that is a product says so, since an addition
may take it in by FMA.

Where ranks work together, each goes through the stages before the boundary with what it alone
holds. Then they exchange what leaves the last of those: every part of an all-reduce goes into the
sum over ranks, and of a gather the rows of the tokens that each rank owns come one after the other,
in BF16 (OWN-1). From there on each rank has all tokens, and goes on with its own copy of the other
arguments; the stages that it has gone through are no longer its own.

Errors are not counted twice: what is computed from an output is judged from the implementation's
own. The value of the output's step is replaced by what was returned, or, where that step does not
round, by the part of its set that rounds to it. The value that the step rounds, which another step
may read too, is replaced by the part of its set in the same way.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moetail.conformance.judge.admissible import Admissible, part_of, rounded
from moetail.conformance.judge.elementwise import add, multiply
from moetail.conformance.judge.norm import GAINS, PLACES, Inverse, affine, inverse_rms
from moetail.conformance.judge.reduction import sum_ranks, weighted_sum
from moetail.spec import Contract, Operation, Step, owned_tokens, tokens_per_rank
from moetail.spec.contract import BF16, FORMATS, Rounding
from moetail.spec.operations import BOUNDARY

Call = Mapping[str, Any]

# What may be said of an op, by the judge's name for it, and with the choices that there are.
_HOW: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "weights": ("read_as", FORMATS),
    "weight": ("read_as", FORMATS),
    "every": ("every", ()),
    "product": ("product", FORMATS),
    "accumulator": ("accumulator", FORMATS),
    "factor": ("read_as", FORMATS),
    "eps": ("place", PLACES),
    "gain": ("gain", GAINS),
    "squares": ("squares", ()),
    "between": ("between", ()),
    "error": ("error", ()),
}


class Program:
    """How to judge one operation, by one contract, on given arguments.

    Attributes:
        shape: of the outputs, [T, H].
        device: of the outputs.
        outputs: with the steps whose values they are. What has one output returns what leaves the
            last of its stages, wherever a contract has the step that the usual one ends with.
        terms: the number of float64 terms that a token takes, from which the judge chooses how many
            tokens to take at once.
    """

    def __init__(self, contract: Contract, operation: Operation, calls: Sequence[Call]) -> None:
        self.operation, self.steps = operation, {step.name: step for step in contract.steps}
        for step in contract.steps:
            _check(step)
        self.last = contract.steps[-1].name
        several = len(operation.outputs) > 1
        self.outputs = [(one, one.step if several else self.last) for one in operation.outputs]
        for output, name in self.outputs:
            if name not in self.steps:
                raise ValueError(f"contract {contract.name}: no step {name!r}, for {output.name}")
        self._given = [operation.values(call) for call in calls]
        first = self._given[0]
        rows, counted = first["rows"], first.get(operation.counts)
        self.shape = ((rows if counted is None else counted).shape[0], rows.shape[-1])
        self.device = rows.device
        summed = operation.distributed and not operation.owns
        ranks = len(calls) if summed else 1
        self.terms = max(ranks, *(_routes(given) for given in self._given)) * self.shape[1]
        behind = {step.stage for step in contract.steps if step.op == "sum_ranks"}
        behind.update(BOUNDARY.stages)
        self._alone = [stage for stage in operation.stages if stage not in behind]
        self._together = [stage for stage in operation.stages if stage in behind]

    def wants(self, needs: str, rank: int) -> bool:
        """Whether a rank was given the argument of that role; "" is no argument, and always so."""
        return not needs or self._given[rank].get(needs) is not None

    def rounding_behind(self, step: Step) -> Rounding:
        """The rounding of a step's value, by itself or by a step of its own; else the usual one."""
        if step.rounds is not None:
            return step.rounds
        behind = [s for s in self.steps.values() if s.op == "round" and step.name in s.args]
        return next((s.rounds for s in behind if s.rounds is not None), BF16)

    def values(self, start: int, stop: int) -> list[Values]:
        """The values of tokens [start, stop) on each rank; the same object as the rank before has
        where their arguments agree, as they should."""
        if not self.operation.distributed:
            return [Values(self, self.operation.stages, self._arguments(0, start, stop))]
        steps = [step for step in self.steps.values() if step.stage in self._together]
        replicated = {name for step in steps for name in (*step.args, step.needs)}
        exchanged = self._exchanged(start, stop)
        found: list[Values] = []
        before: dict[str, Any] = {}
        for rank in range(len(self._given)):
            arguments = {**self._arguments(rank, start, stop), "rows": exchanged}
            agree = rank and all(
                _equal(arguments[name], before[name]) for name in replicated & set(arguments)
            )
            found.append(found[-1] if agree else Values(self, self._together, arguments))
            before = arguments
        return found

    def _exchanged(self, start: int, stop: int) -> Admissible | list[Admissible]:
        """What the ranks exchange: their parts, or the rows of the tokens that they own."""
        ranks, tokens = len(self._given), self.shape[0]

        def left(rank: int, first: int, last: int, origin: int = 0) -> Admissible:
            arguments = self._arguments(rank, first, last, origin)
            return Values(self, self._alone, arguments).of(self.last)

        if not self.operation.owns:
            return [left(rank, start, stop) for rank in range(ranks)]
        slots, parts = tokens_per_rank(tokens, ranks), []
        for rank in range(ranks):
            owned = owned_tokens(tokens, ranks, rank)
            first, last = max(start, owned.start), min(stop, owned.stop)
            if first < last:
                parts.append(rounded(left(rank, first, last, rank * slots), BF16))
        return Admissible.cat(parts)

    def _arguments(self, rank: int, start: int, stop: int, origin: int = 0) -> dict[str, Any]:
        """A rank's arguments by role, of tokens [start, stop); its first slot is ``origin``'s."""
        given = self._given[rank]
        made = dict(given)
        routed = given.get("weights") is not None
        for role, value in given.items():
            axes = self.operation.shape(role)
            if not isinstance(value, Tensor) or not axes:
                continue
            if axes[0].startswith("slots"):
                if axes[0] != "slots":
                    value = value.reshape(-1, given["weights"].shape[1], value.shape[-1])
                made[role] = value[start - origin : stop - origin]
            elif axes[0] == "T" or (axes[0] == "rows" and not routed):
                made[role] = value[start:stop]
        if self.operation.capacity:  # each route has the row of its slot
            made["map"] = torch.arange(made["weights"].numel()).view(made["weights"].shape)
        return made


class Values:
    """The values of a contract's steps for some tokens on one rank, each computed when it is asked
    for; at first there are the arguments by role."""

    def __init__(
        self, program: Program, stages: Collection[str], arguments: dict[str, Any]
    ) -> None:
        self._program, self._stages, self._made = program, stages, arguments

    def of(self, step: str) -> Admissible:
        """The value of a step."""
        return self._set(step, self._made)

    def output(self, step: str, returned: Mapping[str, Tensor]) -> Admissible:
        """What a step's value may be as an output, in BF16, where the steps in ``returned`` have
        given those BF16 values [T, H]."""
        made = self._anchored(step, returned) if returned else self._made
        return rounded(self._set(step, made), BF16)

    def _anchored(self, target: str, returned: Mapping[str, Tensor]) -> dict[str, Any]:
        """What has been computed apart from the returned values, and these in their places."""
        anchors: dict[str, Tensor] = {}
        for output, got in returned.items():
            anchors.update((name, got) for name in self._made_of(output))
        changed = set(anchors)
        for step in self._program.steps.values():
            if changed.intersection(self._takes(step)):
                changed.add(step.name)
        made = {name: value for name, value in self._made.items() if name not in changed}
        for name in self._reached(target, anchors):
            own, got = self.of(name), anchors[name]
            exact = own.lo.dtype is torch.bfloat16
            made[name] = Admissible.of(got) if exact else part_of(own, got)
        return made

    def _made_of(self, output: str) -> Iterator[str]:
        """An output's step, and those of which it is the rounding, or nothing but the value."""
        steps, name = self._program.steps, output
        while name in steps:
            yield name
            step = steps[name]
            if self._active(step) and (step.op != "round" or step.rounds not in (None, BF16)):
                return
            name = step.args[0]

    def _reached(self, target: str, ends: Mapping[str, Tensor]) -> set[str]:
        """Which of the ends a step depends on, if one does not look behind them."""
        if target in ends:
            return {target}
        step = self._program.steps.get(target)
        taken = self._takes(step) if step else ()
        return {found for name in taken for found in self._reached(name, ends)}

    def _active(self, step: Step) -> bool:
        given = not step.needs or self._made.get(step.needs) is not None
        return given and step.stage in self._stages

    def _takes(self, step: Step) -> tuple[str, ...]:
        return step.args if self._active(step) else step.args[:1]

    def _value(self, name: str, made: dict[str, Any], taker: str = "") -> Any:
        if name not in made:
            step = self._program.steps.get(name)
            if step is None:
                operation = self._program.operation
                raise ValueError(f"step {taker}: {operation} has no {name!r}, which it takes")
            if not self._active(step):
                made[name] = self._value(step.args[0], made, step.name)
            else:
                made[name] = self._computed(step, made)
        return made[name]

    def _set(self, name: str, made: dict[str, Any], taker: str = "") -> Admissible:
        value = self._value(name, made, taker)
        if isinstance(value, Tensor):
            value = Admissible.of(value)
            if name in self._program.steps:  # one set, by which a norm knows its own values
                made[name] = value
        if not isinstance(value, Admissible):
            raise ValueError(f"step {taker}: {name} is {type(value).__name__}, not values [T, H]")
        return value

    def _number(self, name: str, made: dict[str, Any], taker: str) -> float:
        value = self._value(name, made, taker)
        if not isinstance(value, (int, float)):
            raise ValueError(f"step {taker}: {name} is {type(value).__name__}, not a number")
        return value

    def _computed(self, step: Step, made: dict[str, Any]) -> Admissible | Inverse:
        value = self._applied(step, made)
        if step.rounds is None:
            return value
        if isinstance(value, Inverse):
            return value.rounded(step.rounds)
        return rounded(value, step.rounds)

    def _applied(self, step: Step, made: dict[str, Any]) -> Admissible | Inverse:
        """What a step's op makes, before any rounding."""
        how = {_HOW[option][0]: value for option, value in step.how.items()}
        own, (first, *others) = step.name, step.args
        if step.op == "weighted_sum":
            rows, weights, index = (self._value(name, made, own) for name in step.args)
            index = index if rows.dim() == 2 else None
            to = self._program.rounding_behind(step)
            return weighted_sum(rows, weights, index, to=to, **how)
        if step.op == "sum_ranks":
            parts = self._value(first, made, own)
            return sum_ranks(parts, to=self._program.rounding_behind(step), **how)
        if step.op == "round" and isinstance(value := self._value(first, made, own), Inverse):
            return value
        value = self._set(first, made, own)
        if step.op == "add":
            return add(value, self._set(others[0], made, own))
        if step.op == "multiply":
            return multiply(value, self._number(others[0], made, own), **how)
        if step.op == "inverse_rms":
            return inverse_rms(value, self._number(others[0], made, own), **how)
        if step.op == "affine":
            inverse, weight = (self._value(name, made, own) for name in others)
            return affine(value, inverse, weight, **how)
        return value


def _check(step: Step) -> None:
    """A ValueError that names the step and the option of which no sets are known."""
    for option, value in step.how.items():
        choices = _HOW[option][1]
        if choices and value not in choices:
            allowed = ", ".join(choices)
            raise ValueError(f"step {step.name}: {option} {value!r} is not judged; only {allowed}")
    every = step.how.get("every", 1)
    if not isinstance(every, int) or every < 1:
        raise ValueError(f"step {step.name}: every {every!r} is not judged; only integers from 1")
    for option, value in (("rounds", step.rounds), *step.how.items()):
        if isinstance(value, Rounding) and value.format == "fp16" and value.mode != "nearest-even":
            raise ValueError(f"step {step.name}: {option} {value.mode!r} into fp16 is not judged")


def _routes(values: Mapping[str, Any]) -> int:
    weights = values.get("weights")
    return 1 if weights is None else max(1, weights.shape[1])


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or torch.equal(one, other)
    return one is other or bool(one == other)
