"""The operations as objects: their arguments, the steps of a contract that they run, their outputs.

Everything that differs between operations is said here, once, and read by all others: the checks
of arguments, the reference, the judge, the makers of cases. Who wants to know something of an
operation asks its object, never its name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moetail.spec.errors import ContractError

__all__ = [
    "ALLREDUCE",
    "BOUNDARY",
    "CONVERT",
    "FINALIZE",
    "FUSED",
    "GATHER",
    "MOE_OUTPUT",
    "OPERATIONS",
    "ROUTE_MAJOR",
    "WORKSPACE",
    "Argument",
    "Operation",
    "Output",
    "operation",
]


@dataclass(frozen=True)
class Argument:
    """One argument of an operation.

    Attributes:
        name: as the API spells it, dotted where it lies inside another: ``"x.expert_weights"``.
        role: what steps and everybody else call it, the same for all operations: ``"weights"``.
        kind: "tensor", "number", "eps" (a finite number >= 0), "pair" (of numbers), "choice",
            "workspace", or "other" (which the operation's own code looks at).
        dtypes: of a tensor.
        shape: of a tensor, by axes: "T" tokens, "K" routes, "H" hidden, "E" experts, "rows" (any
            number), "slots" and "slots * K" (T or more tokens, each its own slot). Where it starts
            with "slots", what lies past the live ones may hold anything.
        optional: None is allowed.
        layout: the rule that a wrong rank or stride breaks.
        needs: the role of an argument without which this one may not be given; "" for none.
        choices: of a choice.
    """

    name: str
    role: str
    kind: str = "tensor"
    dtypes: tuple[torch.dtype, ...] = ()
    shape: tuple[str, ...] = ()
    optional: bool = False
    layout: str = "DOMAIN-1"
    needs: str = ""
    choices: tuple[str, ...] = ()

    def of(self, call: Mapping[str, Any]) -> Any:
        """The argument's value in a call; None where it, or what holds it, is not there."""
        first, *rest = self.name.split(".")
        value = call.get(first)
        for part in rest:
            value = getattr(value, part, None)
        return value

    def put(self, call: Mapping[str, Any], value: Any) -> dict[str, Any]:
        """The call with another value; what holds it is copied, and the given call is unchanged."""
        first, *rest = self.name.split(".")

        def inside(holder: Any, path: list[str]) -> Any:
            if not path:
                return value
            inner = inside(getattr(holder, path[0]), path[1:])
            return dataclasses.replace(holder, **{path[0]: inner})

        return {**call, first: inside(call.get(first), rest)}


@dataclass(frozen=True)
class Output:
    """One output: BF16 ``[T, H]``.

    Attributes:
        name: in reports.
        step: of the contract, whose value it is.
        needs: the role of the argument without which it is None; "" for none.
    """

    name: str
    step: str
    needs: str = ""


@dataclass(frozen=True)
class Operation:
    """One operation of the API.

    Attributes:
        name: the function's (or class's) name, by which implementations are looked up.
        short: a column heading.
        number: in the contract's list; the two derived consumers share one.
        summary: one line.
        arguments: in the order in which they are checked, which is nearly the API's.
        stages: of the contract, that it has; none where there is no arithmetic.
        outputs: of an operation that computes.
        counts: the role of the tensor whose first axis is T.
        layouts: how the rows that it is given may lie, its usual way first: "plain" (one a token),
            "capacity" (slots of K, in a tensor of rank 3), "identity" (one a route, in the order of
            the routes), "route_major" (likewise; a route whose expert is elsewhere has a row that
            nobody reads), "permuted" (in any order, and padded). None where it takes no rows.
        distributed: whether every rank of a group calls it together.
        bounded: whether K and H have the bounds of Beam's operations.
    """

    name: str
    short: str
    number: int
    summary: str
    arguments: tuple[Argument, ...] = ()
    stages: tuple[str, ...] = ()
    outputs: tuple[Output, ...] = ()
    counts: str = ""
    layouts: tuple[str, ...] = ()
    distributed: bool = False
    bounded: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def word(self) -> str:
        """The short name as a command line takes it."""
        return self.short.replace(" ", "-")

    @property
    def computes(self) -> bool:
        """Whether there is arithmetic to judge."""
        return bool(self.stages)

    @property
    def reduces(self) -> bool:
        """Whether it sums a token's routes."""
        return "reduce" in self.stages

    @property
    def has_routes(self) -> bool:
        """Whether it is given a row for each route, and not for each token."""
        return bool(self.layouts) and "plain" not in self.layouts

    @property
    def remote(self) -> bool:
        """Whether a route's expert may be on another rank, so that its place in the map is -1."""
        return "route_major" in self.layouts

    @property
    def owns(self) -> bool:
        """Whether each rank is given the routes of the tokens that it owns, and of no others."""
        return self.distributed and self.capacity

    @property
    def permuted(self) -> bool:
        """Whether rows may come in any order, with a map that says which are whose."""
        return self.computes and "rows" in self.shape("rows")

    @property
    def capacity(self) -> bool:
        """Whether there may be more token slots than live tokens."""
        return self.shape("rows")[:1] in (("slots",), ("slots * K",))

    @property
    def has_boundary(self) -> bool:
        """Whether it ends in the residual add and the next norm."""
        return self.takes("residual")

    @property
    def strategies(self) -> tuple[str, ...]:
        """Names of its strategies."""
        found = self.find("strategy")
        return found.choices if found else ()

    def find(self, role: str) -> Argument | None:
        """The argument of that role; None where there is none."""
        return next((item for item in self.arguments if item.role == role), None)

    def argument(self, role: str) -> Argument:
        """The argument of that role; a KeyError where there is none."""
        found = self.find(role)
        if found is None:
            raise KeyError(f"{self.name} takes no {role}")
        return found

    def takes(self, role: str) -> bool:
        """Whether it has an argument of that role."""
        return self.find(role) is not None

    def shape(self, role: str) -> tuple[str, ...]:
        """The axes of an argument; () where there is none."""
        found = self.find(role)
        return found.shape if found else ()

    def tensors(self, call: Mapping[str, Any]) -> Iterator[tuple[Argument, Tensor]]:
        """The tensors that a call gives, with their arguments."""
        for item in self.arguments:
            value = item.of(call) if item.kind == "tensor" else None
            if isinstance(value, Tensor):
                yield item, value

    def values(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """The call's values by role, as steps take them; what is not given is None.

        A finalized part in the place of routes is ``rows``, without weights and map; the pair of
        residual scales is ``x_scale`` and ``r_scale``.
        """
        made = {item.role: item.of(call) for item in self.arguments if item.kind != "other"}
        if isinstance(made.get("finalized"), Tensor):
            made["rows"] = made["finalized"]
        if "scales" in made:
            made["x_scale"], made["r_scale"] = made["scales"] or (None, None)
        if self.takes("routed_scale") and made["routed_scale"] is None:
            made["routed_scale"] = 1.0
        return made


_BF16, _FP32, _INT32 = (torch.bfloat16,), (torch.float32,), (torch.int32,)
_WEIGHTS = (torch.bfloat16, torch.float16, torch.float32)

_ROUTED_SCALE = Argument("routed_scale", "routed_scale", "number")
_RESIDUAL = Argument("residual", "residual", dtypes=_BF16, shape=("T", "H"))
_POST = (
    Argument("post_eps", "post_eps", "eps", optional=True),
    Argument(
        "post_weight", "post_weight", dtypes=_BF16, shape=("H",), optional=True, needs="post_eps"
    ),
)
# Whether there is a next norm is said by next_eps alone: a layer may pass the weight it holds.
_BOUNDARY = (
    *_POST,
    Argument("next_eps", "next_eps", "eps", optional=True),
    Argument("next_weight", "next_weight", dtypes=_BF16, shape=("H",), optional=True),
    Argument("scales", "scales", "pair", optional=True),
)
_WORKSPACE = Argument("workspace", "workspace", "workspace")


def _routes(
    x: str, rows: tuple[str, ...], tokens: str, dtypes: tuple[torch.dtype, ...]
) -> tuple[Argument, ...]:
    """The three tensors of an ``UnfinalizedMoEOutput`` at ``x``."""
    index = f"{x}.expanded_idx_to_permuted_idx"
    return (
        Argument(f"{x}.gemm2_permuted", "rows", dtypes=_BF16, shape=rows, layout="PACK-1"),
        Argument(f"{x}.expert_weights", "weights", dtypes=dtypes, shape=(tokens, "K")),
        Argument(index, "map", dtypes=_INT32, shape=(tokens, "K")),
    )


def _strategy(*choices: str) -> Argument:
    return Argument("strategy", "strategy", "choice", optional=True, choices=choices)


_IDENTITY = _routes("x", ("slots * K", "H"), "slots", _FP32)
_MOE_OUTPUT = (
    Argument("x.routed_scaling_factor", "routed_scale", "number"),
    Argument("x.routed", "finalized", dtypes=_BF16, shape=("T", "H")),
    *_routes("x.routed", ("rows", "H"), "T", _WEIGHTS),
    Argument("x.shared_output", "shared_output", dtypes=_BF16, shape=("T", "H"), optional=True),
)
_FINALIZE = ("reduce", "round", "scale")
_ANY_LAYOUT = ("permuted", "route_major", "identity")
_TAIL = ("post-norm", "residual", "next norm")
_PAIR = (Output("hidden", "hidden"), Output("normalized", "normalized", "next_eps"))

CONVERT = Operation(
    "convert_flashinfer_moe_output",
    "convert",
    1,
    "normalize FlashInfer's return layouts",
    (
        Argument("flashinfer_output", "flashinfer_output", "other"),
        Argument("do_finalize", "do_finalize", "other"),
        Argument("num_tokens", "num_tokens", "other"),
        Argument("top_k", "top_k", "other"),
        Argument("finalized_output", "finalized_output", "other", optional=True),
    ),
    layouts=_ANY_LAYOUT,
)
ROUTE_MAJOR = Operation(
    "route_major_moe_output",
    "route major",
    2,
    "wrap one-row-per-route GEMM2 output",
    (
        Argument("routes", "routes", "other", layout="PACK-1"),
        Argument("topk_weights", "topk_weights", "other"),
        Argument("topk_ids", "topk_ids", "other"),
        Argument("expert_map", "expert_map", "other", optional=True),
    ),
    layouts=("route_major",),
)
FINALIZE = Operation(
    "beam_moe_finalize",
    "finalize",
    3,
    "top-k reduction, scale, optional post-norm",
    (
        Argument(
            "expert_outputs", "rows", dtypes=_BF16, shape=("slots", "K", "H"), layout="PACK-1"
        ),
        Argument("expert_weights", "weights", dtypes=_FP32, shape=("slots", "K")),
        Argument("output", "output", dtypes=_BF16, shape=("T", "H")),
        _ROUTED_SCALE,
        *_POST,
    ),
    (*_FINALIZE, "post-norm"),
    (Output("output", "post_norm"),),
    counts="output",
    layouts=("capacity",),
    bounded=True,
)
BOUNDARY = Operation(
    "beam_norm_residual_norm",
    "boundary",
    4,
    "optional post-norm, residual add, optional next norm",
    (Argument("x", "rows", dtypes=_BF16, shape=("T", "H")), _RESIDUAL, *_BOUNDARY),
    _TAIL,
    _PAIR,
    counts="rows",
    layouts=("plain",),
)
FUSED = Operation(
    "beam_moe_finalize_norm_residual_norm",
    "fused",
    5,
    "finalize, then the boundary, on one rank",
    (_strategy("fused", "unfused"), *_IDENTITY, _RESIDUAL, _ROUTED_SCALE, *_BOUNDARY),
    (*_FINALIZE, *_TAIL),
    _PAIR,
    counts="residual",
    layouts=("identity",),
    bounded=True,
)
GATHER = Operation(
    "beam_moe_finalize_gather_norm_residual_norm",
    "gather",
    6,
    "finalize owned tokens, gather, boundary",
    (
        _strategy("oneshot", "twoshot", "unfused"),
        *_IDENTITY,
        _RESIDUAL,
        _WORKSPACE,
        _ROUTED_SCALE,
        *_BOUNDARY,
    ),
    (*_FINALIZE, *_TAIL),
    _PAIR,
    counts="residual",
    layouts=("identity",),
    distributed=True,
    bounded=True,
)
WORKSPACE = Operation(
    "BeamAllReduceWorkspace",
    "workspace",
    7,
    "what the ranks of a group share",
    (
        Argument("group", "group", "other"),
        Argument("hidden_size", "hidden_size", "other"),
        Argument("max_tokens", "max_tokens", "other"),
        Argument("dtype", "dtype", "other"),
    ),
    distributed=True,
)
MOE_OUTPUT = Operation(
    "finalize_moe_output",
    "moe output",
    8,
    "finalize any permutation, add the shared part",
    _MOE_OUTPUT,
    (*_FINALIZE, "shared"),
    (Output("output", "shared"),),
    counts="weights",
    layouts=_ANY_LAYOUT,
)
ALLREDUCE = Operation(
    "beam_finalize_allreduce_norm_residual_norm",
    "all-reduce",
    8,
    "finalize, all-reduce, boundary",
    (*_MOE_OUTPUT, _RESIDUAL, _WORKSPACE, *_BOUNDARY),
    (*_FINALIZE, "shared", "all-reduce", *_TAIL),
    _PAIR,
    counts="weights",
    layouts=_ANY_LAYOUT,
    distributed=True,
)

OPERATIONS: tuple[Operation, ...] = (
    CONVERT,
    ROUTE_MAJOR,
    FINALIZE,
    BOUNDARY,
    FUSED,
    GATHER,
    WORKSPACE,
    MOE_OUTPUT,
    ALLREDUCE,
)
"""In the contract's order."""

_BY_WORD = {word: item for item in OPERATIONS for word in (item.name, item.short, item.word)}


def operation(name: str | Operation) -> Operation:
    """The operation of that name or column heading; a ContractError where there is none."""
    if isinstance(name, Operation):
        return name
    if name not in _BY_WORD:
        allowed = ", ".join(f"{item.name} ({item.word})" for item in OPERATIONS)
        raise ContractError("DOMAIN-1", "operation", repr(name), allowed)
    return _BY_WORD[name]
