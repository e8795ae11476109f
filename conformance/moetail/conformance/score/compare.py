"""What public tests would have seen: their criteria applied to every mutant and variant.

The inputs are ordinary ones, a real MoE layer's, since that is what such tests use. Only mutants
that change values take part: no tolerance finds a refusal that is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moetail.conformance.cases import Case
from moetail.conformance.cases.tensors import tensors_in
from moetail.conformance.catalogue import VARIANTS, Change
from moetail.conformance.diagnosis import DEVIATIONS, simulate
from moetail.conformance.judge import judge
from moetail.conformance.score.criteria import CRITERIA
from moetail.reference import Reference
from moetail.spec.rules import ALLREDUCE, BOUNDARY, FINALIZE, FUSED, GATHER, MOE_OUTPUT

__all__ = ["Line", "compare", "markdown", "ordinary_cases"]

_TAIL: dict[str, Any] = {"post": "affine", "next": "affine", "scales": (0.7071067811865476, 1.3)}
_LAYER: dict[str, Any] = {"model": "kimi-k2", "routed_scale": 2.827, "poison": "random"}
_SHARDED: dict[str, Any] = {"shared": True, "local": 0.5, "weights": "fp32"}


@dataclass(frozen=True)
class Line:
    """One criterion's errors.

    Attributes:
        heading: the criterion.
        used_by: where it is in use.
        missed: ids of the mutants that it accepts on every input.
        rejected: ids of the variants that it rejects on some input.
        mutants, variants: how many took part.
    """

    heading: str
    used_by: str
    missed: tuple[str, ...]
    rejected: tuple[str, ...]
    mutants: int
    variants: int


def ordinary_cases(seed: int = 0) -> list[Case]:
    """One tail of a Kimi-K2-like layer for each operation, at a small hidden size."""
    sizes = {"seed": seed, "tokens": 24, "top_k": 8, "hidden": 768}
    options: tuple[tuple[str, dict[str, Any]], ...] = (
        (FINALIZE, {**_LAYER, "post": "affine", "capacity": 4}),
        (FUSED, {**_LAYER, **_TAIL, "strategy": "unfused", "capacity": 4}),
        (GATHER, {**_LAYER, **_TAIL, "strategy": "twoshot", "ranks": 2, "tokens": 23}),
        (GATHER, {**_LAYER, **_TAIL, "strategy": "unfused", "ranks": 2, "tokens": 23}),
        (MOE_OUTPUT, {**_LAYER, **_SHARDED}),
        (MOE_OUTPUT, {**_LAYER, **_SHARDED, "weights": "bf16", "layout": "route_major"}),
        (ALLREDUCE, {**_LAYER, **_SHARDED, **_TAIL, "ranks": 3}),
    )
    made = [Case(name, "moe", **{**sizes, **more}) for name, more in options]
    made.append(Case(BOUNDARY, "normal", seed, 24, 1, 768, **_TAIL))
    return made


def compare(
    seed: int = 0,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Line]:
    """The errors of every public criterion, and the judge's last, all on the same inputs.

    A criterion misses a mutant where it accepts all of its outputs on all inputs.
    """
    torch.set_grad_enabled(False)
    cases = ordinary_cases(seed)
    calls = {case: [case.arguments(rank) for rank in range(case.ranks)] for case in cases}
    expected = {case: simulate(Reference, case.operation, calls[case]) for case in cases}
    subjects: list[Change] = [*DEVIATIONS, *VARIANTS]
    headings = [(item.heading, item.used_by) for item in CRITERIA]
    headings.append(("moetail's judge", "this suite, on the same inputs"))
    accepted: dict[str, set[str]] = {heading: set() for heading, _ in headings}
    for done, subject in enumerate(subjects, start=1):
        passing = {heading for heading, _ in headings}
        for case in cases:
            if case.operation not in subject.operations:
                continue
            results = simulate(subject.implementation, case.operation, calls[case])
            both = zip(tensors_in(results), tensors_in(expected[case]), strict=True)
            pairs = [(got, wanted) for (_, got), (_, wanted) in both]
            for item in CRITERIA:
                if not all(item.passes(got, wanted) for got, wanted in pairs):
                    passing.discard(item.heading)
            if not judge(case.operation, calls[case], results).conforms:
                passing.discard("moetail's judge")
        for heading in passing:
            accepted[heading].add(subject.id)
        progress(done, len(subjects))
    return [
        Line(
            heading,
            used_by,
            tuple(item.id for item in DEVIATIONS if item.id in accepted[heading]),
            tuple(item.id for item in VARIANTS if item.id not in accepted[heading]),
            len(DEVIATIONS),
            len(VARIANTS),
        )
        for heading, used_by in headings
    ]


def markdown(lines: Sequence[Line], suite: tuple[int, int] | None = None) -> str:
    """The comparison as a Markdown table.

    Args:
        suite: (mutants missed, variants rejected) by the whole suite, for a last line.
    """
    rows = [(line.heading, line.used_by, len(line.missed), len(line.rejected)) for line in lines]
    if suite is not None:
        rows.append(("**moetail's suite**", "this suite, on its own inputs", *suite))
    mutants, variants = lines[0].mutants, lines[0].variants
    head = (
        f"| criterion | used by | broken, accepted (of {mutants}) "
        f"| legal, rejected (of {variants}) |\n|---|---|---:|---:|\n"
    )
    return head + "".join(f"| {a} | {b} | {c} | {d} |\n" for a, b, c, d in rows)
