"""A contract's steps as people read them: one formula a stage, and the statements of its rules."""

from __future__ import annotations

from collections.abc import Callable

from moetail.spec.contract import BF16, Contract, Rounding, Step

__all__ = ["formula", "rules_of", "statement"]

# What the contract's text calls the values of steps, and arguments; others go by their names.
_SYMBOLS = {
    "reduce": "a",
    "round": "r",
    "scale": "s",
    "shared": "p",
    "all_reduce": "q",
    "post_norm": "n",
    "post_inverse": "inv",
    "next_inverse": "inv'",
    "post_weight": "w",
    "next_weight": "w'",
    "post_eps": "eps",
    "next_eps": "eps'",
    "shared_output": "shared",
    "rows": "x[t, k]",
    "weights": "w[t, k]",
}
_ALSO = {"weighted_sum": ("ROUTE-1", "ROUTE-3"), "round": ("ROUND-3",), "affine": ("ROUND-4",)}
_MODES = {
    "nearest-even": "to nearest, ties to even",
    "half-away": "to nearest, ties away from zero",
    "half-down": "to nearest, ties towards zero",
    "half-up": "to nearest, ties up",
    "toward-zero": "towards zero",
    "up": "up",
    "odd": "to odd",
    "dither": "stochastic",
}


def _rounded(text: str, rounding: Rounding | None) -> str:
    """RN is the contract's rounding; another says its format, and its way if that is unusual."""
    if rounding is None:
        return text
    if rounding == BF16:
        return f"RN({text})"
    usual = Rounding(rounding.format)
    way = "" if rounding == usual else f" {_MODES[rounding.mode]}"
    through = f" through {rounding.through.upper()}" if rounding.through else ""
    return f"round({text}, {rounding.format.upper()}{way}{through})"


def _sum(step: Step, term: str, over: str) -> str:
    every = step.how.get("every", 1)
    often = "" if every == 1 else f" (every {every})"
    return f"{step.how['accumulator'].upper()} sum{often} over {over} of {term}"


class _Reader:
    """The expressions of one stage: steps of others, and inverses, by their symbols."""

    def __init__(self, contract: Contract, stage: str) -> None:
        self.steps = {step.name: step for step in contract.steps if step.stage == stage}

    def of(self, name: str) -> str:
        step = self.steps.get(name)
        if step is None or step.op == "inverse_rms":
            return _SYMBOLS.get(name, name)
        return self.expression(step)

    def expression(self, step: Step) -> str:
        return _rounded(_EXPRESSIONS[step.op](self, step), step.rounds)

    def weighted_sum(self, step: Step) -> str:
        weight, row = (f"float({self.of(name)})" for name in (step.args[1], step.args[0]))
        if step.how["weights"] != "fp32":
            weight = f"float({step.how['weights'].upper()}({self.of(step.args[1])}))"
        product = f"{weight} * {row}"
        if step.how["product"] != "fp32":
            product = f"{step.how['product'].upper()}({product})"
        return _sum(step, product, "live k")

    def sum_ranks(self, step: Step) -> str:
        return _sum(step, self.of(step.args[0]), "ranks")

    def multiply(self, step: Step) -> str:
        value, factor = map(self.of, step.args)
        if step.how["factor"] != "fp32":
            factor = f"{step.how['factor'].upper()}({factor})"
        if step.stage == "scale":
            value, factor = f"float({value})", f"float({factor})"
        return f"{value} * {factor}"

    def add(self, step: Step) -> str:
        return " + ".join(map(self.of, step.args))

    def inverse_rms(self, step: Step) -> str:
        value, eps = map(self.of, step.args)
        square = _rounded(f"{value} * {value}", step.how["squares"])
        return {
            "inside": f"1 / sqrt(mean({square}) + {eps})",
            "outside": f"1 / (sqrt(mean({square})) + {eps})",
            "sum": f"1 / sqrt((sum({square}) + {eps}) / H)",
            "squared": f"1 / sqrt(mean({square}) + {eps} * {eps})",
            "missing": f"1 / sqrt(mean({square}))",
        }[step.how["eps"]]

    def affine(self, step: Step) -> str:
        value, inverse, weight = map(self.of, step.args)
        normed = _rounded(f"{value} * {inverse}", step.how["between"])
        if step.how["gain"] == "none":
            return normed
        if step.how["weight"] != "fp32":
            weight = f"{step.how['weight'].upper()}({weight})"
        return f"{normed} * {f'(1 + {weight})' if step.how['gain'] == '1+w' else weight}"

    def nothing(self, step: Step) -> str:
        return self.of(step.args[0])


_EXPRESSIONS: dict[str, Callable[[_Reader, Step], str]] = {
    "weighted_sum": _Reader.weighted_sum,
    "sum_ranks": _Reader.sum_ranks,
    "multiply": _Reader.multiply,
    "add": _Reader.add,
    "inverse_rms": _Reader.inverse_rms,
    "affine": _Reader.affine,
    "round": _Reader.nothing,
}


def formula(contract: Contract, stage: str) -> str:
    """``s = RN(float(r) * float(routed_scale))``: the value that a stage makes."""
    reader = _Reader(contract, stage)
    *_, last = reader.steps.values()
    parts = [f"{_SYMBOLS.get(last.name, last.name)} = {reader.expression(last)}"]
    parts += [
        f"{_SYMBOLS[step.name]} = {reader.inverse_rms(step)}"
        for step in reader.steps.values()
        if step.op == "inverse_rms"
    ]
    return ", ".join(parts)


def rules_of(contract: Contract, stage: str) -> tuple[str, ...]:
    """Ids of the rules that a stage follows."""
    steps = [step for step in contract.steps if step.stage == stage]
    named = {rule for step in steps for rule in (step.rule, *_ALSO.get(step.op, ()))}
    if stage == "residual":
        named.discard("ROUND-3")
    return tuple(sorted(named))


def _kept(step: Step) -> str:
    return "kept in FP32" if step.rounds is None else f"rounded to {step.rounds.format.upper()}"


def _value(contract: Contract, name: str) -> str:
    """A value that a norm takes, in words."""
    return "rounded" if contract.step(name).rounds is not None else "unrounded"


def _round_1(contract: Contract) -> str:
    how = contract.step("reduce").how
    narrow = "" if how["weights"] == "fp32" else f" of weights in {how['weights'].upper()}"
    product, total = how["product"].upper(), how["accumulator"].upper()
    return f"The top-k reduction accumulates {product} products{narrow} in {total}."


def _round_2(contract: Contract) -> str:
    first, second = contract.step("round"), contract.step("scale")
    again = "is rounded again" if first.rounds and second.rounds else f"is {_kept(second)}"
    return (
        f"The reduction is {_kept(first)} before the scale, and the scaled value {again}; "
        "a scale of 1.0 is the identity."
    )


def _round_3(contract: Contract) -> str:
    ways = dict.fromkeys(step.rounds for step in contract.steps if step.rounds is not None)
    said = (f"to {one.format.upper()} is {_MODES[one.mode]}" for one in ways)
    return f"Rounding {', '.join(said)}."


def _round_4(contract: Contract) -> str:
    inverse, affine = contract.step("post_inverse"), contract.step("post_norm")
    before = affine.how["between"] is None
    place = {"inside": "inside the root", "outside": "outside the root"}
    eps = place.get(inverse.how["eps"], inverse.how["eps"])
    return (
        f"A norm computes in FP32 on the {_value(contract, inverse.args[0])} input, with eps "
        f"{eps}, the mean over exactly H, and the affine multiply "
        f"{'before its one' if before else 'after the'} rounding; its inverse RMS is within "
        "2^-16 relative."
    )


def _round_5(contract: Contract) -> str:
    products = {contract.step(name).rounds for name in ("x_product", "r_product")}
    each = "kept in FP32" if products == {None} else "rounded to BF16"
    return f"Where scales are given, each residual product is {each}, then the sum is."


def _round_6(contract: Contract) -> str:
    inverse = _value(contract, contract.step("next_inverse").args[0])
    elements = _value(contract, contract.step("normalized").args[0])
    if inverse == elements:
        return f"The next norm takes the {inverse} hidden, inverse RMS and elements alike."
    return f"The next norm takes the inverse RMS of the {inverse} hidden, elements {elements}."


def _round_7(contract: Contract) -> str:
    shared, ranks = contract.step("shared"), contract.step("all_reduce")
    summed = "rounded" if shared.rounds else "kept in FP32"
    return (
        f"The shared part is added after the scale and the sum is {summed}; the "
        f"{ranks.how['accumulator'].upper()} sum over ranks is {_kept(ranks)} before the post-norm."
    )


_STATEMENTS = {
    "ROUND-1": _round_1,
    "ROUND-2": _round_2,
    "ROUND-3": _round_3,
    "ROUND-4": _round_4,
    "ROUND-5": _round_5,
    "ROUND-6": _round_6,
    "ROUND-7": _round_7,
}


def statement(contract: Contract, rule_id: str) -> str:
    """What a rule of kind ROUND says where the arithmetic is the contract's."""
    return _STATEMENTS[rule_id](contract)
