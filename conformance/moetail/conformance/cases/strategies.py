"""Hypothesis strategies over cases. They shrink to few tokens and routes, and plain options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from moetail.conformance.cases.aimed import AIMED, aimed_cases
from moetail.conformance.cases.case import CALLED, POISONS, WEIGHT_DTYPES, Case, options_of
from moetail.conformance.cases.models import MODELS
from moetail.conformance.cases.sources import SOURCES
from moetail.spec import operation

__all__ = ["case_strategy"]

_HIDDEN = (256, 512, 768, 1024, 2048)
_SCALES = (1.0, 2.5, 0.5, 1.5, 0.75, 16 / 3, 2.827, -1.0)
_RESIDUAL_SCALES = (None, (0.7, 1.3), (1.0, 0.5), (0.25, 1.0), (1.0, -1.7))
_EPS = (1e-6, 1e-5, 1e-3, 0.0)


def case_strategy(
    name: str | None = None,
    ranks: Sequence[int] = (1,),
    *,
    max_tokens: int = 8,
    max_top_k: int = 8,
    max_hidden: int = 1024,
    sources: Sequence[str] | None = None,
) -> st.SearchStrategy[Case]:
    """Cases of an operation, or of any.

    Args:
        name: an operation's; None draws one.
        ranks: the rank counts to draw from; others than 1 only for operations that take them.
        max_tokens, max_top_k, max_hidden: the largest T, K and H.
        sources: names of SOURCES; None takes them all.
    """
    operations = CALLED if name is None else (name,)
    names = tuple(SOURCES) if sources is None else tuple(sources)
    aimed = {source.name for source in AIMED}
    general = tuple(name for name in names if name not in aimed)
    templates = [
        case
        for name in operations
        for count in ranks
        for source in names
        if source in aimed
        for case in aimed_cases(name, source=source, ranks=count, tokens=2)
    ]
    if not general and not templates:
        raise ValueError(f"sources: {', '.join(names)} serve no case of {', '.join(operations)}")
    return _cases(
        operations,
        tuple(ranks),
        general,
        templates,
        max_tokens=max_tokens,
        max_top_k=max_top_k,
        max_hidden=max_hidden,
    )


@st.composite
def _cases(
    draw: st.DrawFn,
    operations: tuple[str, ...],
    ranks: tuple[int, ...],
    general: tuple[str, ...],
    templates: list[Case],
    *,
    max_tokens: int,
    max_top_k: int,
    max_hidden: int,
) -> Case:
    """A general case, or an aimed one of its sizes: drawn in this order to shrink to the former."""
    plain = draw(
        _general(
            operations,
            ranks,
            general or ("normal",),
            max_tokens=max_tokens,
            max_top_k=max_top_k,
            max_hidden=max_hidden,
        )
    )
    if not templates or (general and not draw(st.booleans())):
        return plain
    case = draw(st.sampled_from(templates))
    changes: dict[str, Any] = {
        "seed": plain.seed,
        "tokens": plain.tokens,
        "hidden": plain.hidden,
        "poison": plain.poison,
    }
    if case.layout == "plain":
        changes["poison"] = "nan"
    else:
        # Two routes at least: some sources need them.
        changes["top_k"] = max(2, plain.top_k)
    return case.replace(**changes)


def _hidden(max_hidden: int) -> st.SearchStrategy[int]:
    return st.sampled_from([size for size in _HIDDEN if size <= max_hidden])


@st.composite
def _general(
    draw: st.DrawFn,
    operations: tuple[str, ...],
    ranks: tuple[int, ...],
    sources: tuple[str, ...],
    *,
    max_tokens: int,
    max_top_k: int,
    max_hidden: int,
) -> Case:
    target = operation(draw(st.sampled_from(operations)))
    applies = options_of(target.name)
    source = draw(st.sampled_from(sources))
    more: dict[str, Any] = {}

    def option(name: str, values: Sequence[Any]) -> Any:
        """Draw an option that the operation has; the first value is the plainest."""
        if name not in applies:
            return None
        more[name] = draw(st.sampled_from(list(values)))
        return more[name]

    # Drawn also where "finalized" has no use for it: a shorter draw would count as the simpler one.
    layout = draw(st.sampled_from(target.layouts))
    option("weights", tuple(WEIGHT_DTYPES))
    option("local", (1.0, 0.5, 0.25))
    tile = draw(st.sampled_from([8, 16, 32]))
    capacity = draw(st.integers(0, 3))
    option("ranks", ranks)
    aliased = draw(st.booleans())
    if option("routed", ("routes", "finalized")) == "finalized":
        del more["weights"], more["local"]
        if "aliased" in applies:
            more["aliased"] = aliased
    else:
        more["layout"] = layout
        if layout == "permuted":
            more["tile"] = tile
        elif "capacity" in applies and layout != "route_major":
            more["capacity"] = capacity
    option("flat", (False, True))
    option("routed_scale", _SCALES)
    option("shared", (False, True))
    option("strategy", (None, *target.strategies))
    option("scales", _RESIDUAL_SCALES)
    for norm in ("post", "next"):
        if option(norm, ("none", "norm", "affine")) not in (None, "none"):
            more[f"{norm}_eps"] = draw(st.sampled_from(_EPS))
    option("poison", POISONS)
    top_k = 1 if layout == "plain" else draw(st.integers(1, max_top_k))
    if source == "moe":
        more["model"] = draw(st.sampled_from([None, *MODELS]))
        if layout == "plain":
            more["experts"] = 8
        elif more["model"]:
            top_k = min(top_k, MODELS[more["model"]].experts)
    return Case(
        target.name,
        source,
        draw(st.integers(0, 2**16)),
        draw(st.integers(0, max_tokens)),
        top_k,
        draw(_hidden(max_hidden)),
        **more,
    )
