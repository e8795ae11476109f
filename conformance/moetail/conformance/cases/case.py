"""A case: everything that decides the arguments of one call, and an id that recreates it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from moetail.conformance.cases.models import MODELS
from moetail.spec.rules import (
    ALLREDUCE,
    BOUNDARY,
    CONVERT,
    FINALIZE,
    FUSED,
    GATHER,
    MOE_OUTPUT,
    ROUTE_MAJOR,
)

__all__ = ["LAYOUTS", "POISONS", "STRATEGIES", "WEIGHT_DTYPES", "Arguments", "Case", "options_of"]

Arguments = dict[str, Any]

POISONS = ("nan", "inf", "huge", "random")
WEIGHT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NORMS = ("none", "norm", "affine")

# The layouts that each operation takes, its usual one first. "plain": no routes at all.
LAYOUTS: dict[str, tuple[str, ...]] = {
    CONVERT: ("permuted", "route_major", "identity"),
    ROUTE_MAJOR: ("route_major",),
    FINALIZE: ("capacity",),
    BOUNDARY: ("plain",),
    FUSED: ("identity",),
    GATHER: ("identity",),
    MOE_OUTPUT: ("permuted", "route_major", "identity"),
    ALLREDUCE: ("permuted", "route_major", "identity"),
}
STRATEGIES: dict[str, tuple[str, ...]] = {
    FUSED: ("fused", "unfused"),
    GATHER: ("oneshot", "twoshot", "unfused"),
}
_HAS_POST = (FINALIZE, BOUNDARY, FUSED, GATHER, ALLREDUCE)
_HAS_BOUNDARY = (BOUNDARY, FUSED, GATHER, ALLREDUCE)
_HAS_REMOTE = (CONVERT, ROUTE_MAJOR, MOE_OUTPUT, ALLREDUCE)
_HAS_OUTPUT = (MOE_OUTPUT, ALLREDUCE)
_BOUNDED = (FINALIZE, FUSED, GATHER)  # 256 <= H <= 8192, H % 256 == 0

# The operations that an option means something to; options not listed apply to all.
_APPLIES: dict[str, tuple[str, ...]] = {
    "ranks": (GATHER, ALLREDUCE),
    "weights": _HAS_REMOTE,
    "capacity": (FINALIZE, FUSED, GATHER, CONVERT, MOE_OUTPUT, ALLREDUCE),
    "routed_scale": (FINALIZE, FUSED, GATHER, *_HAS_OUTPUT),
    "post": _HAS_POST,
    "next": _HAS_BOUNDARY,
    "scales": _HAS_BOUNDARY,
    "shared": _HAS_OUTPUT,
    "local": _HAS_REMOTE,
    "routed": (CONVERT, *_HAS_OUTPUT),
    "flat": (CONVERT, ROUTE_MAJOR),
    "aliased": (CONVERT,),
    "strategy": tuple(STRATEGIES),
    "poison": tuple(name for name in LAYOUTS if name != BOUNDARY),
}

# Fields that say how the values are wrapped, not what they are: cases that differ in nothing else
# draw the same values, which makes them comparable (PACK-2, ROUTE-2, OWN-4).
_WRAPPING = ("operation", "layout", "capacity", "poison", "strategy", "tile", "flat", "aliased")

# The id's name of each option, in the order in which an id lists them.
_OPTIONS = {
    "seed": "seed",
    "ranks": "ranks",
    "layout": "layout",
    "weights": "weights",
    "capacity": "cap",
    "routed_scale": "scale",
    "post": "post",
    "post_eps": "posteps",
    "next": "next",
    "next_eps": "nexteps",
    "scales": "scales",
    "shared": "shared",
    "routed": "routed",
    "strategy": "strategy",
    "model": "model",
    "experts": "experts",
    "local": "local",
    "tile": "tile",
    "flat": "flat",
    "aliased": "aliased",
    "poison": "poison",
}
_FIELD_OF = {name: field_name for field_name, name in _OPTIONS.items()}


def _number(value: float) -> str:
    text = repr(float(value))
    return (text.removesuffix(".0")).replace("e+", "e")


def _flag(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError("yes or no")
    return text == "yes"


def _scales(text: str) -> tuple[float, float]:
    x_scale, r_scale = text.split("x")
    return float(x_scale), float(r_scale)


_PARSERS: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "bool": _flag,
    "str": str,
    "str | None": str,
    "tuple[float, float] | None": _scales,
}


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, tuple):
        return "x".join(_number(part) for part in value)
    return str(value)


@dataclass(frozen=True)
class Case:
    """One call of one operation; two cases with equal fields have equal arguments, bit for bit.

    Attributes:
        operation: the name of one of the contract's operations.
        source: where the values come from, a key of SOURCES.
        seed: >= 0.
        tokens: T. 0 is legal.
        top_k: K.
        hidden: H.
        ranks: W, the ranks that call together.
        layout: "capacity", "identity", "route_major", "permuted"; "plain" where no routes are;
            "" takes the operation's usual one.
        weights: the dtype of the routing weights, "fp32", "bf16" or "fp16".
        capacity: token slots beyond the live ones, all poison.
        routed_scale: routed_scale or routed_scaling_factor.
        post: the norm of the MoE output: "none", "norm" (without affine) or "affine".
        next: the norm of hidden, likewise.
        scales: (x_scale, r_scale) of the residual add, or None.
        shared: a shared_output is given.
        strategy: the operation's strategy, None for its default.
        model: a key of MODELS whose routing the "moe" source imitates, or None.
        experts: E; 0 takes the model's, or enough for the ranks.
        local: the share of the experts that this group of ranks holds; the others' routes are -1.
        post_eps, next_eps: of the norms that are on.
        poison: what lies where nothing may be read: "nan", "inf", "huge" or "random".
        routed: "routes", or "finalized" for a part that is a [T, H] tensor already.
        tile: rows that each expert's group is padded to in the "permuted" layout.
        flat: the other legal shape of the same arguments: flat weights and map for
            convert_flashinfer_moe_output (finalized: the bare tensor instead of a list of one),
            [T * K, H] routes for route_major_moe_output.
        aliased: convert_flashinfer_moe_output gets the destination too.
    """

    operation: str
    source: str = "normal"
    seed: int = 0
    tokens: int = 4
    top_k: int = 2
    hidden: int = 256
    ranks: int = field(default=1, kw_only=True)
    layout: str = field(default="", kw_only=True)
    weights: str = field(default="fp32", kw_only=True)
    capacity: int = field(default=0, kw_only=True)
    routed_scale: float = field(default=1.0, kw_only=True)
    post: str = field(default="none", kw_only=True)
    next: str = field(default="none", kw_only=True)
    scales: tuple[float, float] | None = field(default=None, kw_only=True)
    shared: bool = field(default=False, kw_only=True)
    strategy: str | None = field(default=None, kw_only=True)
    model: str | None = field(default=None, kw_only=True)
    experts: int = field(default=0, kw_only=True)
    local: float = field(default=1.0, kw_only=True)
    post_eps: float = field(default=1e-6, kw_only=True)
    next_eps: float = field(default=1e-6, kw_only=True)
    poison: str = field(default="nan", kw_only=True)
    routed: str = field(default="routes", kw_only=True)
    tile: int = field(default=8, kw_only=True)
    flat: bool = field(default=False, kw_only=True)
    aliased: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        self._one_of("operation", tuple(LAYOUTS))
        for name in ("routed_scale", "local", "post_eps", "next_eps"):
            object.__setattr__(self, name, float(getattr(self, name)))
        if self.scales is not None:
            object.__setattr__(self, "scales", (float(self.scales[0]), float(self.scales[1])))
        if not self.layout:
            object.__setattr__(self, "layout", LAYOUTS[self.operation][0])
        self._check_model()
        if not self.experts:
            object.__setattr__(self, "experts", self._default_experts())
        self._check_sizes()
        self._check_options()
        self._check_source()

    def _fail(self, name: str, allowed: str) -> None:
        raise ValueError(f"{name}: {getattr(self, name)!r}; {allowed}")

    def _one_of(self, name: str, allowed: tuple[str | None, ...]) -> None:
        if getattr(self, name) not in allowed:
            self._fail(name, f"must be one of {', '.join(map(str, allowed))}")

    def _only(self, name: str, operations: tuple[str, ...]) -> None:
        """A field that means nothing to the operation keeps its default, so that ids are unique."""
        if self.operation not in operations and getattr(self, name) != _default(name):
            self._fail(name, f"does not apply to {self.operation}")

    def _default_experts(self) -> int:
        if self.model is not None:
            return MODELS[self.model].experts
        # Enough for every rank of an expert-parallel group to hold all routes of a token.
        sharded = self.ranks if self.operation == ALLREDUCE else 1
        return max(8, 2 * self.top_k, sharded * self.top_k)

    def _check_model(self) -> None:
        if self.model is not None:
            self._one_of("model", tuple(MODELS))
            if self.source != "moe":
                self._fail("model", f"applies to source moe only, not to {self.source}")

    def _check_sizes(self) -> None:
        for name, least in (("seed", 0), ("tokens", 0), ("ranks", 1), ("capacity", 0)):
            if getattr(self, name) < least:
                self._fail(name, f"must be >= {least}")
        if not 1 <= self.top_k <= 32:
            self._fail("top_k", "must lie in 1..32")
        if self.operation in _BOUNDED and not (
            256 <= self.hidden <= 8192 and self.hidden % 256 == 0
        ):
            self._fail("hidden", "must be a multiple of 256 in 256..8192")
        if self.hidden < 1:
            self._fail("hidden", "must be >= 1")
        if self.experts < self.top_k:
            self._fail("experts", f"must be >= top_k = {self.top_k}")
        if self.tile < 1:
            self._fail("tile", "must be >= 1")
        if not 0.0 < self.local <= 1.0:
            self._fail("local", "must lie in (0, 1]")
        for name in ("routed_scale", "post_eps", "next_eps"):
            if not math.isfinite(getattr(self, name)):
                self._fail(name, "must be finite")
        for name in ("post_eps", "next_eps"):
            if getattr(self, name) < 0.0:
                self._fail(name, "must be >= 0")
        if self.scales is not None and not all(map(math.isfinite, self.scales)):
            self._fail("scales", "must be finite")

    def _check_options(self) -> None:
        self._one_of("layout", LAYOUTS[self.operation])
        self._one_of("weights", tuple(WEIGHT_DTYPES))
        self._one_of("post", NORMS)
        self._one_of("next", NORMS)
        self._one_of("poison", POISONS)
        self._one_of("routed", ("routes", "finalized"))
        self._one_of("strategy", (None, *STRATEGIES.get(self.operation, ())))
        for name, operations in _APPLIES.items():
            self._only(name, operations)
        if self.operation == BOUNDARY:
            for name, value in (("top_k", 1), ("experts", 8)):
                if getattr(self, name) != value:
                    self._fail(name, f"must be {value} for {self.operation}, which has no routes")
        for norm in ("post", "next"):
            if getattr(self, norm) == "none" and getattr(self, f"{norm}_eps") != 1e-6:
                self._fail(f"{norm}_eps", f"needs {norm}")
        if self.aliased and self.routed != "finalized":
            self._fail("aliased", "needs routed finalized")
        if self.tile != 8 and self.layout != "permuted":
            self._fail("tile", "needs layout permuted")
        if self.capacity and self.operation in _HAS_REMOTE and self.layout != "identity":
            self._fail("capacity", f"does not apply to layout {self.layout}")
        if self.routed == "finalized":
            unused: tuple[tuple[str, Any], ...] = (
                ("weights", "fp32"),
                ("local", 1.0),
                ("tile", 8),
                ("capacity", 0),
                ("layout", LAYOUTS[self.operation][0]),
            )
            for name, value in unused:
                if getattr(self, name) != value:
                    self._fail(name, "does not apply to routed finalized, which has no routes")

    def _check_source(self) -> None:
        from moetail.conformance.cases.sources import SOURCES, refusal

        self._one_of("source", tuple(SOURCES))
        why = refusal(self)
        if why is not None:
            self._fail("source", why)

    @functools.cached_property
    def id(self) -> str:
        """The canonical id: operation/source/sizes, then every option that is not its default."""
        sizes = f"T{self.tokens}-K{self.top_k}-H{self.hidden}"
        options = []
        for name, short in _OPTIONS.items():
            value = getattr(self, name)
            if value != self._usual(name):
                options.append(f"{short}:{_show(value)}")
        parts = [self.operation, self.source, sizes]
        if options:
            parts.append("+".join(options))
        return "/".join(parts)

    def _usual(self, name: str) -> Any:
        if name == "layout":
            return LAYOUTS[self.operation][0]
        if name == "experts":
            return self._default_experts()
        return _default(name)

    def __str__(self) -> str:
        return self.id

    @classmethod
    def parse(cls, text: str) -> Case:
        """The case of that id; ValueError names the field that is wrong."""
        parts = text.strip().split("/")
        if not 3 <= len(parts) <= 4:
            raise ValueError(
                f"id: {text!r} must read operation/source/T..-K..-H.. or, with options, "
                "operation/source/T..-K..-H../option:value+option:value"
            )
        values: dict[str, Any] = {"operation": parts[0], "source": parts[1]}
        sizes = parts[2].split("-")
        if len(sizes) != 3:
            raise ValueError(f"sizes: {parts[2]!r} must read T..-K..-H..")
        for letter, name, size in zip("TKH", ("tokens", "top_k", "hidden"), sizes, strict=True):
            if not (size[:1] == letter and size[1:].isdecimal()):
                raise ValueError(f"{name}: {size!r} must read {letter} and a number")
            values[name] = int(size[1:])
        kinds = {item.name: str(item.type) for item in dataclasses.fields(cls)}
        for option in parts[3].split("+") if len(parts) == 4 else ():
            short, _, shown = option.partition(":")
            if short not in _FIELD_OF:
                raise ValueError(f"{short}: no such option; known: {', '.join(_FIELD_OF)}")
            name = _FIELD_OF[short]
            if name in values:
                raise ValueError(f"{short}: given twice")
            try:
                values[name] = _PARSERS[kinds[name]](shown)
            except ValueError as error:
                raise ValueError(f"{short}: cannot read {shown!r}: {error}") from None
        return cls(**values)

    @property
    def elements(self) -> int:
        """Elements that the call reads, by which cases are ordered from small to large."""
        return self.tokens * self.top_k * self.hidden * self.ranks

    def replace(self, **changes: Any) -> Case:
        """A case with those fields changed; experts follow ranks and top_k where they did."""
        if "experts" not in changes and self.experts == self._default_experts():
            changes["experts"] = 0
        if "layout" not in changes and "operation" in changes:
            changes["layout"] = ""
        return dataclasses.replace(self, **changes)

    @functools.cached_property
    def value_key(self) -> str:
        """What seeds the values: the fields, apart from those that only wrap them."""
        kept = (
            f"{item.name}={getattr(self, item.name)!r}"
            for item in dataclasses.fields(self)
            if item.name not in _WRAPPING and item.name != "ranks"
        )
        return ";".join(kept)

    def arguments(self, rank: int = 0, device: torch.device | str = "cpu") -> Arguments:
        """The operation's arguments by name, without workspace, on ``rank`` of ``ranks``.

        Every rank makes its own from the case alone. Tensors are fresh on every call: the caller
        may change them.
        """
        from moetail.conformance.cases.problem import make_arguments

        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank: {rank}; must lie in 0..{self.ranks - 1}")
        return make_arguments(self, rank, torch.device(device))


def options_of(operation: str) -> frozenset[str]:
    """The options, of those that not every operation has, that mean something to this one."""
    return frozenset(name for name, operations in _APPLIES.items() if operation in operations)


@functools.cache
def _default(name: str) -> Any:
    return next(item.default for item in dataclasses.fields(Case) if item.name == name)
