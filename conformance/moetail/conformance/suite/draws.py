"""Which cases a check is tried on: shapes and options, drawn from the plan."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from moetail.conformance.cases import Case, aimed_cases
from moetail.conformance.run.check import Trials
from moetail.conformance.run.plan import Plan
from moetail.conformance.run.trial import Trial
from moetail.spec import Operation, operation

__all__ = ["aimed", "draw", "general", "options", "shape", "trials"]

# (T, K, H): one token and one route, a warp's width crossed, K at both ends of its domain, H that
# is and is not a power of two, T that no rank count divides.
_QUICK = ((1, 1, 256), (5, 8, 512), (3, 2, 768), (2, 32, 256), (8, 4, 512), (9, 6, 256))
_FULL = (
    *_QUICK,
    (7, 4, 1024),
    (17, 8, 1024),
    (33, 3, 512),
    (64, 8, 768),
    (4, 10, 2048),
    (2, 8, 7168),
    (3, 8, 5120),
    (1, 8, 8192),
    (6, 16, 3072),
    (130, 2, 256),
)
# A GPU takes other paths for many tokens, and shows there what it does with the ends of a row. Only
# general cases have them: aimed values are searched for, which takes long for so many.
_MANY = ((640, 2, 256), (1030, 1, 512), (700, 3, 768), (300, 8, 1024))
# Operations without a bound on H also get widths that no vector load divides.
_ODD_WIDTHS = (100, 1, 513)
_ODD_WIDTHS_FULL = (*_ODD_WIDTHS, 2880, 4097)
_SCALES = ((0.5, 1.0), (0.7071067811865476, 1.4142135623730951), (1.0, 0.3), (-1.5, 2.5))
_ROUTED_SCALES = (1.0, 2.5, 0.75, 1.5, 16.0 / 3.0, -2.0)
_EPS = (1e-6, 1e-5, 1e-3)


def shape(
    plan: Plan, name: str, rng: random.Random, ranks: int, *, many: bool = False
) -> tuple[int, int, int]:
    """T, K, H of a case; ``many`` adds such as only a GPU is quick with."""
    choice = _QUICK if plan.profile == "quick" else _FULL
    if many and plan.device == "cuda":
        choice = (*choice, *(_MANY if plan.profile != "quick" else _MANY[:1]))
    tokens, top_k, hidden = rng.choice(choice)
    if ranks > 1:
        tokens = rng.choice((1, ranks - 1, ranks, ranks + 1, 2 * ranks + 1, tokens))
    target = operation(name)
    if not target.has_routes:
        top_k = 1
    if target.computes and not target.bounded and rng.random() < 0.25:
        hidden = rng.choice(_ODD_WIDTHS if plan.profile == "quick" else _ODD_WIDTHS_FULL)
    return tokens, top_k, hidden


def options(target: Operation, rng: random.Random) -> dict[str, Any]:
    """Any legal options of an operation that computes."""
    drawn: dict[str, Any] = {}
    if target.takes("routed_scale"):
        drawn["routed_scale"] = rng.choice(_ROUTED_SCALES)
        drawn["poison"] = rng.choice(("nan", "inf", "huge"))
    if target.capacity:
        drawn["capacity"] = rng.choice((0, 1, 5))
    if target.takes("post_eps"):
        drawn["post"] = rng.choice(("none", "norm", "affine"))
        if drawn["post"] != "none":
            drawn["post_eps"] = rng.choice(_EPS)
    if target.has_boundary:
        drawn["next"] = rng.choice(("none", "norm", "affine", "affine"))
        if drawn["next"] != "none":
            drawn["next_eps"] = rng.choice(_EPS)
        drawn["scales"] = rng.choice((None, *_SCALES))
    if target.strategies:
        drawn["strategy"] = rng.choice((None, *target.strategies))
    if target.permuted:
        drawn["layout"] = rng.choice(("permuted", "permuted", "route_major"))
        drawn["weights"] = rng.choice(("fp32", "bf16", "fp16"))
        drawn["local"] = rng.choice((1.0, 0.5, 0.25))
        drawn["shared"] = rng.choice((False, True))
        if drawn["layout"] == "permuted":
            drawn["tile"] = rng.choice((8, 16, 64))
    return drawn


def draw(
    plan: Plan,
    name: str,
    label: object,
    count: int,
    source: str = "normal",
    *,
    fixed: Mapping[str, Any] | None = None,
    free: bool = False,
    ranks: Iterable[int] | None = None,
) -> Iterator[Case]:
    """``count`` cases of an operation for every number of ranks.

    Args:
        label: tells draws apart.
        fixed: fields of the case that are given: shapes or options.
        free: options that are not given are drawn, else they keep their defaults.
        ranks: restricts the numbers of ranks.

    A combination that the source cannot serve is drawn anew, so that every count is met.
    """
    sizes = plan.group_sizes(name) if ranks is None else tuple(ranks)
    for group in sizes:
        made = attempt = 0
        while made < count:
            rng = plan.random(label, name, source, group, attempt)
            attempt += 1
            tokens, top_k, hidden = shape(plan, name, rng, group, many=free)
            fields: dict[str, Any] = {"tokens": tokens, "top_k": top_k, "hidden": hidden}
            fields |= {"seed": rng.randrange(1 << 16), "ranks": group}
            if free:
                fields |= options(operation(name), rng)
            fields |= fixed or {}
            try:
                yield Case(name, source, **fields)
            except ValueError:
                if attempt > 200 * count:
                    raise
                continue
            made += 1


def trials(cases: Iterable[Case], variation: str = "") -> Iterator[Trial]:
    for case in cases:
        yield Trial(case.operation, case, variation)


def general(source: str, *, quick: int = 2, full: int = 8, **fixed: Any) -> Trials:
    """Cases of one source with any options."""

    def made(plan: Plan, name: str) -> Iterator[Trial]:
        count = plan.pick(quick, full)
        yield from trials(draw(plan, name, "general", count, source, fixed=fixed, free=True))

    return made


def aimed(*sources: str, quick: int = 1, full: int = 3) -> Trials:
    """Cases by which sources that are aimed at a rule decide it: every set of options they have.

    In the quick profile a distributed operation gets one set for each source and number of ranks,
    another for the next number.
    """

    def made(plan: Plan, name: str) -> Iterator[Trial]:
        for turn, ranks in enumerate(plan.group_sizes(name)):
            for source in sources:
                for number in range(plan.pick(quick, full)):
                    yield from trials(_aimed(plan, name, source, ranks, turn, number))

    return made


def _in_some_layout(case: Case, rng: random.Random) -> Case:
    """The layout is no part of what is aimed at, so every layout gets its share."""
    if case.source == "routes" or case.routed != "routes":
        return case
    return case.replace(layout=rng.choice(case.target.layouts))


def _aimed(plan: Plan, name: str, source: str, ranks: int, turn: int, number: int) -> list[Case]:
    """One case for each set of options of a source that applies."""
    target = operation(name)
    for attempt in range(100):
        rng = plan.random("aimed", name, source, ranks, number, attempt)
        tokens, top_k, hidden = shape(plan, name, rng, ranks)
        hidden = max(hidden, 64)  # shares of so few elements say nothing
        cases = aimed_cases(
            name,
            source=source,
            ranks=ranks,
            seed=rng.randrange(1 << 16),
            tokens=tokens,
            top_k=top_k,
            hidden=hidden,
        )
        if target.strategies and not target.distributed:
            # Both strategies, in turn: the operation's other path is easily forgotten.
            others = [case.replace(strategy=target.strategies[-1]) for case in cases[1::2]]
            cases = [*cases[::2], *others]
        if target.permuted:
            cases = [_in_some_layout(case, rng) for case in cases]
        if cases:
            one = plan.profile == "quick" and len(plan.group_sizes(name)) > 1
            return [cases[turn % len(cases)]] if one else cases
    return []  # the source does not apply to this operation, or not to one rank
