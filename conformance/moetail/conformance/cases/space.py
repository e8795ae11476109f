"""The cases of an operation within bounds, and how one of them is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from moetail.conformance.cases.aimed import AIMED, aimed_cases
from moetail.conformance.cases.case import CALLED, POISONS, WEIGHT_DTYPES, Case, options_of
from moetail.conformance.cases.models import MODELS
from moetail.conformance.cases.sources import SOURCES
from moetail.spec import operation

__all__ = ["CaseSpace", "Choose"]

_HIDDEN = (256, 512, 768, 1024, 2048)
_SCALES = (1.0, 2.5, 0.5, 1.5, 0.75, 16 / 3, 2.827, -1.0)
_RESIDUAL_SCALES = (None, (0.7, 1.3), (1.0, 0.5), (0.25, 1.0), (1.0, -1.7))
_EPS = (1e-6, 1e-5, 1e-3, 0.0)

_Value = TypeVar("_Value")


class Choose(Protocol):
    """Picks one of some values, such as ``random.Random.choice``; the first is the plainest."""

    def __call__(self, values: Sequence[_Value], /) -> _Value: ...


class CaseSpace:
    """Cases of an operation, or of any.

    Args:
        name: an operation's; None chooses one.
        ranks: the rank counts to choose from; others than 1 only for operations that take them.
        tokens: the smallest and the largest T.
        max_top_k, max_hidden: the largest K and H.
        sources: names of SOURCES; None takes them all.
    """

    def __init__(
        self,
        name: str | None = None,
        ranks: Sequence[int] = (1,),
        *,
        tokens: tuple[int, int] = (0, 8),
        max_top_k: int = 8,
        max_hidden: int = 1024,
        sources: Sequence[str] | None = None,
    ) -> None:
        self._operations = CALLED if name is None else (name,)
        self._ranks = tuple(ranks)
        self._tokens = range(tokens[0], tokens[1] + 1)
        self._top_k = range(1, max_top_k + 1)
        self._hidden = [size for size in _HIDDEN if size <= max_hidden]
        names = tuple(SOURCES) if sources is None else tuple(sources)
        aimed = {source.name for source in AIMED}
        self._general = tuple(name for name in names if name not in aimed)
        self._templates = [
            case
            for name in self._operations
            for count in ranks
            for source in names
            if source in aimed
            for case in aimed_cases(name, source=source, ranks=count, tokens=2)
        ]
        if not self._general and not self._templates:
            served = ", ".join(self._operations)
            raise ValueError(f"sources: {', '.join(names)} serve no case of {served}")

    def draw(self, choose: Choose) -> Case:
        """A general case, or an aimed one of its sizes, in this order: the former is plainer."""
        plain = self._plain(choose)
        if not self._templates or (self._general and not choose((False, True))):
            return plain
        case = choose(self._templates)
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

    def _plain(self, choose: Choose) -> Case:
        target = operation(choose(self._operations))
        applies = options_of(target.name)
        source = choose(self._general or ("normal",))
        more: dict[str, Any] = {}

        def option(name: str, values: Sequence[Any]) -> Any:
            """Choose an option that the operation has."""
            if name not in applies:
                return None
            more[name] = choose(values)
            return more[name]

        # Chosen also where "finalized" has no use for it: fewer choices would count as plainer.
        layout = choose(target.layouts)
        option("weights", tuple(WEIGHT_DTYPES))
        option("local", (1.0, 0.5, 0.25))
        tile = choose((8, 16, 32))
        capacity = choose(range(4))
        option("ranks", self._ranks)
        aliased = choose((False, True))
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
                more[f"{norm}_eps"] = choose(_EPS)
        option("poison", POISONS)
        top_k = 1 if layout == "plain" else choose(self._top_k)
        if source == "moe":
            more["model"] = choose((None, *MODELS))
            if layout == "plain":
                more["experts"] = 8
            elif more["model"]:
                top_k = min(top_k, MODELS[more["model"]].experts)
        return Case(
            target.name,
            source,
            choose(range(2**16 + 1)),
            choose(self._tokens),
            top_k,
            choose(self._hidden),
            **more,
        )
