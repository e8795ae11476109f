"""Whole tails: real layers, all sources of values, and any case that there is.

What fails here is named by the diagnosis, which knows the deviations of the catalogue.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from moetail.conformance.cases import MODELS
from moetail.conformance.cases.space import CaseSpace
from moetail.conformance.run.call import CallSpec
from moetail.conformance.run.check import TAIL, Phase, checks_rule
from moetail.conformance.run.plan import Plan
from moetail.conformance.run.subject import Subject
from moetail.conformance.run.trial import NotJudged, Trial, Violation
from moetail.conformance.suite.draws import draw, trials
from moetail.spec.rules import BOUNDARY, FUSED, GATHER

_SOURCES = ("normal", "cancel", "subnormal", "huge", "tiny", "wide", "zeros")


def _layers(plan: Plan, name: str) -> Iterator[Trial]:
    """Models at a small hidden size; in the full profile all of them, and at their own size too."""
    if name == BOUNDARY:
        return
    sizes = plan.group_sizes(name)
    models = list(MODELS.items())
    plan.random("layers", name).shuffle(models)
    for turn, (key, model) in enumerate(models[: plan.pick(2, len(models))]):
        ranks = sizes[turn % len(sizes)]
        fixed = {"model": key, "top_k": model.top_k, "tokens": 3 * ranks + 1, "ranks": ranks}
        small = {**fixed, "hidden": 256 if plan.profile == "quick" else 512}
        yield from trials(draw(plan, name, key, 1, "moe", fixed=small, free=True, ranks=(ranks,)))
        if plan.profile == "quick" or not model.in_domain:
            continue
        real = {**fixed, "hidden": model.hidden, "tokens": 4}
        yield from trials(
            draw(plan, name, (key, "real"), 1, "moe", fixed=real, free=True, ranks=(ranks,))
        )


@checks_rule(TAIL, _layers, believed=(Phase.WHOLE, 10))
def test_tail_on_real_layers(subject: Subject, trial: Trial) -> None:
    subject.conforms(*subject.run(CallSpec(trial.case)))


def _any_source(plan: Plan, name: str) -> Iterator[Trial]:
    sizes = plan.group_sizes(name)
    for turn, source in enumerate(_SOURCES):
        ranks = (sizes[turn % len(sizes)],) if plan.profile == "quick" else sizes
        count = plan.pick(1, 2)
        yield from trials(draw(plan, name, "any", count, source, free=True, ranks=ranks))


@checks_rule(TAIL, _any_source, believed=(Phase.WHOLE, 20))
def test_tail_on_every_source(subject: Subject, trial: Trial) -> None:
    subject.conforms(*subject.run(CallSpec(trial.case)))


# T, K, H of long batches. Kernels divide those in other ways, by all three sizes, and what is wrong
# there is wrong nowhere else: rows that a thread holds no part of, or a block's second token.
_LONG = ((270, 5, 5120), (1100, 2, 7168), (1030, 8, 4608), (2100, 1, 5120), (700, 10, 2048))


def _batches(plan: Plan, name: str) -> Iterator[Trial]:
    """A GPU is quick with them; a CPU tries the shortest one in the full profile."""
    count = plan.pick(1, len(_LONG)) if plan.device == "cuda" else plan.pick(0, 1)
    for turn, (tokens, top_k, hidden) in enumerate(_LONG[:count]):
        fixed: dict[str, Any] = {"tokens": tokens, "hidden": hidden}
        fixed["top_k"] = 1 if name == BOUNDARY else top_k
        if name == FUSED:
            fixed["strategy"] = "fused"
        if name == GATHER:
            fixed["strategy"] = ("oneshot", "twoshot")[turn % 2]
        yield from trials(draw(plan, name, ("long", tokens), 1, fixed=fixed, free=True))


@checks_rule(TAIL, _batches, believed=(Phase.WHOLE, 40))
def test_tail_on_long_batches(subject: Subject, trial: Trial) -> None:
    subject.conforms(*subject.run(CallSpec(trial.case)))


def _anything(plan: Plan, name: str) -> Iterator[Trial]:
    for ranks in plan.group_sizes(name):
        space = CaseSpace(name, (ranks,), tokens=(1, 8))
        rng = plan.random("anything", name, ranks)
        number = plan.pick(4, 40) if ranks == 1 else plan.pick(3, 12)
        yield from trials(space.draw(rng.choice) for _ in range(number))


@checks_rule(TAIL, _anything, believed=(Phase.WHOLE, 30))
def test_tail_on_any_case(subject: Subject, trial: Trial) -> None:
    """Shapes, options, layouts and sources at will; what fails is made plainer while it fails."""
    try:
        subject.conforms(*subject.run(CallSpec(trial.case)))
        return
    except Violation as violation:
        found = violation
    for change in _PLAINER:
        try:
            plainer = Trial(trial.operation, found.trial.case.replace(**change))
        except ValueError:  # an option that others need, or that the source does
            continue
        if plainer == found.trial or plainer.case.elements > found.trial.case.elements:
            continue
        subject.begin(subject.rule, plainer)
        with contextlib.suppress(NotJudged):
            try:
                subject.conforms(*subject.run(CallSpec(plainer.case)))
            except Violation as violation:
                found = violation
    raise found


_PLAINER: tuple[dict[str, Any], ...] = (
    {"source": "normal", "model": None, "experts": 0},
    {"source": "normal"},
    *({"tokens": size} for size in (4, 2, 1)),
    *({"top_k": size} for size in (4, 2, 1)),
    {"hidden": 256},
    {"layout": "", "tile": 8, "capacity": 0},
    {"post": "none", "post_eps": 1e-6},
    {"next": "none", "next_eps": 1e-6},
    {"scales": None},
    {"shared": False},
    {"routed_scale": 1.0},
    {"local": 1.0},
    {"weights": "fp32"},
    {"strategy": None},
    {"flat": False},
    {"aliased": False},
    {"poison": "nan"},
    {"seed": 0},
)
