"""The arithmetic of a contract as data: a program of few steps, which others evaluate.

A step takes values by name, the arguments of a call or what earlier steps made, and makes one.
``reference`` evaluates the steps as tensors, ``judge`` as sets of admissible values; the page of
the contract, the mutants and the diagnosis read them too. Nothing here computes.

Ops:
    weighted_sum(rows, weights, map)  FP32 sum over the live routes of weight * row
    sum_ranks(part)                   FP32 sum over the ranks' parts
    multiply(value, factor)           FP32 product with a number
    add(value, other)                 FP32 sum
    inverse_rms(value, eps)           1 / sqrt(mean of squares over H + eps), one a row
    affine(value, inverse, weight)    FP32 product with the inverse and, where given, the weight
    round(value)                      nothing but the rounding

Steps belong to stages, which are the lines of the contract's table: an operation has the stages
that it names. A step whose option is not given, and one of a stage that an operation does not have,
is the identity on its first argument: not even a rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

__all__ = ["BEAM", "BF16", "FORMATS", "OPS", "Contract", "Rounding", "Step"]

FORMATS = ("bf16", "fp16", "tf32", "fp32")
"""The formats that a value may be rounded to."""

MODES = (
    "nearest-even",
    "half-away",
    "half-down",
    "half-up",
    "toward-zero",
    "up",
    "odd",
    "dither",
)

# What may be said of an op beyond its arguments, with the contract's usual choice.
OPS: Mapping[str, Mapping[str, Any]] = {
    "weighted_sum": {
        "weights": "fp32",  # the format that the weights are narrowed to first
        "product": "fp32",  # the format that each product is rounded to
        "accumulator": "fp32",  # the format of the running sum between routes, in their order
        "every": 1,  # after how many routes the running sum is kept in that format
    },
    "sum_ranks": {"accumulator": "fp32"},  # the format of the running sum between ranks
    "multiply": {"factor": "fp32"},  # the format of the factor
    "add": {},
    "inverse_rms": {
        "eps": "inside",  # the root; "outside" it, in the "sum", "squared" inside, or "missing"
        "squares": None,  # a Rounding of each square
        "error": 0.0,  # relative, of the inverse
    },
    "affine": {
        "weight": "fp32",  # the format that the weight is narrowed to first
        "gain": "w",  # or "1+w", or "none"
        "between": None,  # a Rounding before the weight
    },
    "round": {},
}


@dataclass(frozen=True)
class Rounding:
    """A rounding of an FP32 value.

    Attributes:
        format: a key of :data:`FORMATS`.
        mode: one of :data:`MODES`.
        through: a format that the value is rounded to before, to nearest even; "" for none.
    """

    format: str = "bf16"
    mode: str = "nearest-even"
    through: str = ""

    def __post_init__(self) -> None:
        for name, allowed in (("format", FORMATS), ("mode", MODES), ("through", ("", *FORMATS))):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name}: {getattr(self, name)!r}; allowed: {', '.join(map(repr, allowed))}"
                )


BF16 = Rounding()
"""The rounding that the contract asks for: to BF16, to nearest, ties to even."""


@dataclass(frozen=True)
class Step:
    """One step of a contract.

    Attributes:
        name: of the step, and of the value that it makes.
        op: a key of :data:`OPS`.
        args: names of the values that it takes.
        rounds: the rounding of its result; None leaves it in FP32.
        rule: id of the rule that says so.
        stage: the stage that it belongs to.
        needs: the argument without which the step is the identity; "" for none.
        how: what is said of the op beyond its arguments, by the names of :data:`OPS`; what is not
            mentioned is as usual.
    """

    name: str
    op: str
    args: tuple[str, ...]
    rounds: Rounding | None = None
    rule: str = ""
    stage: str = ""
    needs: str = ""
    how: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise ValueError(f"op: {self.op!r}; allowed: {', '.join(OPS)}")
        unknown = [name for name in self.how if name not in OPS[self.op]]
        if unknown:
            allowed = ", ".join(OPS[self.op]) or "nothing"
            raise ValueError(f"how: {unknown[0]!r} says nothing of {self.op}; allowed: {allowed}")
        object.__setattr__(self, "how", {**OPS[self.op], **self.how})


@dataclass(frozen=True)
class Contract:
    """A program: its steps in the order in which they are evaluated.

    Attributes:
        name: by which it is asked for.
        steps: each takes arguments of the call and values of steps before it.
    """

    name: str
    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        names = [step.name for step in self.steps]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ValueError(f"steps: two are called {twice[0]!r}")
        for number, step in enumerate(self.steps):
            late = [arg for arg in step.args if arg in names[number:]]
            if late:
                raise ValueError(f"step {step.name}: takes {late[0]!r}, which comes later")

    def step(self, name: str) -> Step:
        """The step of that name; a KeyError that lists the names where there is none."""
        for step in self.steps:
            if step.name == name:
                return step
        raise KeyError(f"no step {name!r}; there are {', '.join(s.name for s in self.steps)}")

    def edit(self, name: str, **changes: Any) -> Contract:
        """The contract with one step changed: by fields of :class:`Step`, or by what ``how`` says.

        ``edit("round", rounds=None)``, ``edit("scale", factor="bf16")``.
        """
        step = self.step(name)
        own = {item.name for item in fields(Step)}
        said = {key: value for key, value in changes.items() if key not in own}
        kept = {key: value for key, value in changes.items() if key in own}
        changed = replace(step, **{"how": {**step.how, **said}, **kept})
        return replace(self, steps=tuple(changed if s is step else s for s in self.steps))

    def each(self, op: str, **changes: Any) -> Contract:
        """The contract with every step of an op changed, as :meth:`edit` changes one."""
        made = self
        for step in self.steps:
            made = made.edit(step.name, **changes) if step.op == op else made
        return made

    def each_rounding(self, **changes: Any) -> Contract:
        """The contract with every rounding changed, by fields of :class:`Rounding`."""

        def changed(step: Step) -> Step:
            if step.rounds is None:
                return step
            return replace(step, rounds=replace(step.rounds, **changes))

        return replace(self, steps=tuple(map(changed, self.steps)))

    def without(self, name: str) -> Contract:
        """The contract without a step: who took its value takes the step's first argument."""
        gone = self.step(name)
        kept = replace(self, steps=tuple(step for step in self.steps if step is not gone))
        return kept._rewired(name, gone.args[0], lambda step: True)

    def insert(self, after: str, *steps: Step) -> Contract:
        """The contract with steps more behind the step, or the argument, ``after``: who took that
        one's value takes the last one's."""
        place = next((k + 1 for k, item in enumerate(self.steps) if item.name == after), 0)
        before, behind = self.steps[:place], self.steps[place:]
        later = {item.name for item in behind}
        made = replace(self, steps=(*before, *steps, *behind))
        return made._rewired(after, steps[-1].name, lambda item: item.name in later)

    def take(self, name: str, **instead: str) -> Contract:
        """The contract with a step that takes other values: ``take("next_inverse", hidden="sum")``.

        Raises:
            KeyError: no such step, or none of such an argument.
        """
        args = self.step(name).args
        for old in instead:
            if old not in args:
                raise KeyError(f"step {name} takes no {old!r}; it takes {', '.join(args)}")
        return self.edit(name, args=tuple(instead.get(arg, arg) for arg in args))

    def move(self, name: str, after: str) -> Contract:
        """The contract with a step at another place, where it takes ``after``'s value."""
        step = self.step(name)
        moved = replace(step, args=(after, *step.args[1:]))
        return self.without(name).insert(after, moved)

    def _rewired(self, old: str, new: str, where: Callable[[Step], bool]) -> Contract:
        def changed(step: Step) -> Step:
            if not where(step) or old not in step.args:
                return step
            return replace(step, args=tuple(new if arg == old else arg for arg in step.args))

        return replace(self, steps=tuple(map(changed, self.steps)))

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of the stages, in order."""
        return tuple(dict.fromkeys(step.stage for step in self.steps))

    def differences(self, other: Contract) -> tuple[str, ...]:
        """Names of the steps in which two contracts differ, in this one's order, then the other's
        own."""
        mine = {step.name: step for step in self.steps}
        theirs = {step.name: step for step in other.steps}
        every = dict.fromkeys((*mine, *theirs))
        return tuple(name for name in every if mine.get(name) != theirs.get(name))


def _norm(kind: str, value: str, name: str, rule: str, stage: str) -> tuple[Step, Step]:
    """A norm of ``value``: the inverse of its rows' RMS, then the elements."""
    inverse, eps = f"{kind}_inverse", f"{kind}_eps"
    return (
        Step(inverse, "inverse_rms", (value, eps), None, rule, stage, eps),
        Step(name, "affine", (value, inverse, f"{kind}_weight"), BF16, rule, stage, eps),
    )


BEAM = Contract(
    "beam",
    (
        Step(
            "reduce", "weighted_sum", ("rows", "weights", "map"), None, "ROUND-1", "reduce", "map"
        ),
        Step("round", "round", ("reduce",), BF16, "ROUND-2", "round", "map"),
        Step("scale", "multiply", ("round", "routed_scale"), BF16, "ROUND-2", "scale"),
        Step(
            "shared", "add", ("scale", "shared_output"), BF16, "ROUND-7", "shared", "shared_output"
        ),
        Step("all_reduce", "sum_ranks", ("shared",), BF16, "ROUND-7", "all-reduce"),
        *_norm("post", "all_reduce", "post_norm", "ROUND-4", "post-norm"),
        Step(
            "x_product",
            "multiply",
            ("post_norm", "x_scale"),
            BF16,
            "ROUND-5",
            "residual",
            "x_scale",
        ),
        Step(
            "r_product", "multiply", ("residual", "r_scale"), BF16, "ROUND-5", "residual", "r_scale"
        ),
        Step("sum", "add", ("x_product", "r_product"), None, "ROUND-5", "residual"),
        Step("hidden", "round", ("sum",), BF16, "ROUND-5", "residual"),
        *_norm("next", "hidden", "normalized", "ROUND-6", "next norm"),
    ),
)
"""Beam's contract, which every rule of this project speaks of."""
