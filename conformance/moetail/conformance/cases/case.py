"""A case: everything that decides the arguments of one call, and an id that recreates it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moetail.conformance.cases import ids
from moetail.conformance.cases.arithmetic import generator, integers
from moetail.conformance.cases.layouts import (
    capacity_slots,
    permuted_rows,
    poisoned,
    route_major_rows,
)
from moetail.conformance.cases.models import MODELS
from moetail.conformance.cases.problem import Problem
from moetail.conformance.cases.source import SOURCES
from moetail.conformance.cases.tensors import mapped, tensors_in
from moetail.spec import (
    OPERATIONS,
    MoEOutput,
    Operation,
    UnfinalizedMoEOutput,
    operation,
    owned_tokens,
    tokens_per_rank,
)

__all__ = [
    "CALLED",
    "POISONS",
    "WEIGHT_DTYPES",
    "Arguments",
    "Case",
    "options_of",
    "problem_of",
]

Arguments = dict[str, Any]

CALLED = tuple(item.name for item in OPERATIONS if item.layouts)
"""The operations that there are cases of: all but the workspace."""

POISONS = ("nan", "inf", "huge", "random")
WEIGHT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NORMS = ("none", "norm", "affine")

# The layouts in which token slots may follow the live ones.
_SLOTS = {"capacity", "identity"}

# The operations that an option means something to; options not listed apply to all.
_APPLIES: dict[str, Callable[[Operation], bool]] = {
    "ranks": lambda item: item.distributed,
    "weights": lambda item: item.remote,
    "capacity": lambda item: not _SLOTS.isdisjoint(item.layouts),
    "routed_scale": lambda item: item.takes("routed_scale"),
    "post": lambda item: item.takes("post_eps"),
    "next": lambda item: item.takes("next_eps"),
    "scales": lambda item: item.takes("scales"),
    "shared": lambda item: item.takes("shared_output"),
    "local": lambda item: item.remote,
    "routed": lambda item: item.takes("finalized") or item.takes("do_finalize"),
    "flat": lambda item: not item.computes,
    "aliased": lambda item: item.takes("finalized_output"),
    "strategy": lambda item: bool(item.strategies),
    "poison": lambda item: item.has_routes,
}

# Fields that say how the values are wrapped, not what they are: cases that differ in nothing else
# draw the same values, which makes them comparable (PACK-2, ROUTE-2, OWN-4).
_WRAPPING = ("operation", "layout", "capacity", "poison", "strategy", "tile", "flat", "aliased")


@functools.cache
def options_of(name: str) -> frozenset[str]:
    """The options, of those that not every operation has, that mean something to this one."""
    return frozenset(option for option, applies in _APPLIES.items() if applies(operation(name)))


@functools.cache
def _default(name: str) -> Any:
    return next(item.default for item in dataclasses.fields(Case) if item.name == name)


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
        self._one_of("operation", CALLED)
        for name in ("routed_scale", "local", "post_eps", "next_eps"):
            object.__setattr__(self, name, float(getattr(self, name)))
        if self.scales is not None:
            object.__setattr__(self, "scales", (float(self.scales[0]), float(self.scales[1])))
        if not self.layout:
            object.__setattr__(self, "layout", self.target.layouts[0])
        self._check_model()
        if not self.experts:
            object.__setattr__(self, "experts", self._default_experts())
        self._check_sizes()
        self._check_options()
        self._one_of("source", tuple(SOURCES))
        why = SOURCES[self.source].refuse(self)
        if why is not None:
            self._fail("source", why)

    def _fail(self, name: str, allowed: str) -> None:
        raise ValueError(f"{name}: {getattr(self, name)!r}; {allowed}")

    def _one_of(self, name: str, allowed: tuple[str | None, ...]) -> None:
        if getattr(self, name) not in allowed:
            self._fail(name, f"must be one of {', '.join(map(str, allowed))}")

    def _default_experts(self) -> int:
        if self.model is not None:
            return MODELS[self.model].experts
        # Enough for every rank of an expert-parallel group to hold all routes of a token.
        return max(8, 2 * self.top_k, self.shards * self.top_k)

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
        if self.target.bounded and not (256 <= self.hidden <= 8192 and self.hidden % 256 == 0):
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
        self._one_of("layout", self.target.layouts)
        self._one_of("weights", tuple(WEIGHT_DTYPES))
        self._one_of("post", NORMS)
        self._one_of("next", NORMS)
        self._one_of("poison", POISONS)
        self._one_of("routed", ("routes", "finalized"))
        self._one_of("strategy", (None, *self.target.strategies))
        for name in _APPLIES:  # what means nothing keeps its default, so that ids are unique
            if name not in options_of(self.operation) and getattr(self, name) != _default(name):
                self._fail(name, f"does not apply to {self.operation}")
        if not self.target.has_routes:
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
        if self.capacity and self.layout not in _SLOTS:
            self._fail("capacity", f"does not apply to layout {self.layout}")
        if self.routed == "finalized":
            unused: tuple[tuple[str, Any], ...] = (
                ("weights", "fp32"),
                ("local", 1.0),
                ("tile", 8),
                ("capacity", 0),
                ("layout", self.target.layouts[0]),
            )
            for name, value in unused:
                if getattr(self, name) != value:
                    self._fail(name, "does not apply to routed finalized, which has no routes")

    @functools.cached_property
    def target(self) -> Operation:
        """The operation that is called, as an object."""
        return operation(self.operation)

    @property
    def has_routes(self) -> bool:
        """Whether the call is given routes, and not a part that is finalized already."""
        return self.target.has_routes and self.routed == "routes"

    @property
    def shards(self) -> int:
        """Ranks that the experts are sharded over; where ranks own tokens, each has all experts."""
        return 1 if self.target.owns else self.ranks

    def gives(self, role: str) -> bool:
        """Whether the argument of that role, if the operation takes it, is not None."""
        return {
            "rows": self.has_routes or self.layout == "plain",
            "weights": self.has_routes,
            "map": self.has_routes,
            "finalized": self.routed == "finalized",
            "shared_output": self.shared,
            "post_eps": self.post != "none",
            "post_weight": self.post == "affine",
            "next_eps": self.next != "none",
            "next_weight": self.next == "affine",
        }.get(role, True)

    @functools.cached_property
    def id(self) -> str:
        """The canonical id: operation/source/sizes, then every option that is not its default."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return ids.written(
            {
                name: value
                for name, value in values.items()
                if name not in ids.OPTIONS or value != self._usual(name)
            }
        )

    def _usual(self, name: str) -> Any:
        if name == "layout":
            return self.target.layouts[0]
        if name == "experts":
            return self._default_experts()
        return _default(name)

    def __str__(self) -> str:
        return self.id

    @classmethod
    def parse(cls, text: str) -> Case:
        """The case of that id; ValueError names the field that is wrong."""
        return cls(
            **ids.read(text, {item.name: str(item.type) for item in dataclasses.fields(cls)})
        )

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
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank: {rank}; must lie in 0..{self.ranks - 1}")
        place = torch.device(device)
        made: Arguments = mapped(_call(self, rank), lambda tensor: tensor.to(place))
        if self.aliased:
            ((_, made["finalized_output"]),) = tensors_in(made["flashinfer_output"])
        return made


# --- from values to arguments ---------------------------------------------------------------------


def _problem(case: Case) -> Problem:
    made = SOURCES[case.source].make(case)
    return dataclasses.replace(made, weights=made.weights.to(WEIGHT_DTYPES[case.weights]))


# The ranks of a case follow each other. Small cases come again with the next implementation, of
# which the catalogue has many.
_last = functools.lru_cache(maxsize=1)(_problem)
_small = functools.lru_cache(maxsize=1024)(_problem)
_SMALL = 1 << 15  # elements: 64 KiB of rows


def problem_of(case: Case) -> Problem:
    """The values of a case. Not to be changed: it may be shared by later calls."""
    return (_small if case.elements <= _SMALL else _last)(case)


def _call(case: Case, rank: int) -> Arguments:
    """The arguments by name: each is put where the operation says that its role lies."""
    call: Arguments = {}
    if case.target.takes("map"):
        nothing: Any = None
        x = UnfinalizedMoEOutput(nothing, nothing, nothing, case.layout == "route_major")
        call["x"] = MoEOutput(x) if case.target.permuted else x
    values = _values(case, problem_of(case), rank)
    for item in case.target.arguments:
        if item.role in values:
            call = item.put(call, values[item.role])
    return call


def _values(case: Case, problem: Problem, rank: int) -> Arguments:
    """The arguments by role; there may be more than the operation takes."""
    gen = generator(case.id, "layout", rank)
    made: Arguments = {
        "do_finalize": case.routed == "finalized",
        "num_tokens": case.tokens,
        "top_k": case.top_k,
        "residual": problem.residual.clone(),
        "routed_scale": case.routed_scale,
        "scales": case.scales,
        "shared_output": problem.shared[rank].clone() if case.shared else None,
        "strategy": case.strategy,
    }
    for norm in ("post", "next"):
        kind = getattr(case, norm)
        weight: Tensor = getattr(problem, f"{norm}_weight")
        made[f"{norm}_weight"] = weight.clone() if kind == "affine" else None
        made[f"{norm}_eps"] = None if kind == "none" else getattr(case, f"{norm}_eps")
    if case.has_routes:
        made |= (_routes if case.target.remote else _slots)(case, problem, rank, gen)
    else:
        part = problem.finalized[rank].clone()
        made["rows" if case.layout == "plain" else "finalized"] = part
        made["flashinfer_output"] = part if case.flat else [part]
    if case.target.takes("output"):
        made["output"] = poisoned((case.tokens, case.hidden), case.poison, gen)
    return made


def _slots(case: Case, problem: Problem, rank: int, gen: torch.Generator) -> Arguments:
    """Token slots: the live ones that the rank has, then poison in rows and weights alike."""

    def slots(values: Tensor, extra: int) -> Tensor:
        return capacity_slots(values, extra=extra, poison=case.poison, gen=gen)

    if not case.target.takes("map"):
        # Weights may stop anywhere between the live slots and the capacity.
        extra = int(integers(0, case.capacity, (1,), gen))
        weights = slots(problem.weights, extra)
        return {"weights": weights, "rows": slots(problem.rows, case.capacity)}
    owned = owned_tokens(case.tokens, case.ranks, rank)
    extra = tokens_per_rank(case.tokens, case.ranks) - len(owned) + case.capacity
    rows, weights = (
        slots(values[owned.start : owned.stop], extra) for values in (problem.rows, problem.weights)
    )
    # The map is the identity past the live slots too, as a kernel that never looks at liveness
    # leaves it.
    index = torch.arange(weights.numel(), dtype=torch.int32).view(weights.shape)
    return {"rows": rows.flatten(0, 1), "weights": weights, "map": index}


def _routes(case: Case, problem: Problem, rank: int, gen: torch.Generator) -> Arguments:
    """The rank's routes in the case's layout; all others are -1."""
    routing = problem.routing
    local = routing.owners == rank
    weights = problem.weights.clone()
    if problem.dead_weights is not None:
        weights = torch.where(local, weights, problem.dead_weights.to(weights.dtype))
    if case.layout == "permuted":
        rows, index = permuted_rows(
            problem.rows,
            local,
            routing.ids,
            tile=case.tile,
            poison=case.poison,
            gen=gen,
            tight=problem.tight,
        )
    else:
        rows, index = route_major_rows(problem.rows, local, poison=case.poison, gen=gen)
        if case.capacity:
            extra = case.capacity * case.top_k
            rows = capacity_slots(rows, extra=extra, poison=case.poison, gen=gen)
    made: Arguments = {"rows": rows, "weights": weights, "map": index}
    if case.target.takes("flashinfer_output"):
        named = (weights.reshape(-1), index.reshape(-1)) if case.flat else (weights, index)
        made["flashinfer_output"] = [rows, *named]
    if case.target.takes("topk_ids"):
        made["routes"] = rows if case.flat else rows.view(case.tokens, case.top_k, case.hidden)
        made["topk_weights"] = weights
        made["topk_ids"] = routing.ids.to(torch.int32)
        made["expert_map"] = None
        if case.local < 1.0:
            held = routing.holders == rank
            negative = -integers(1, 3, (case.experts,), gen).long()
            numbers = torch.where(held, held.cumsum(0) - 1, negative)
            made["expert_map"] = numbers.to(torch.int32)
    return made
