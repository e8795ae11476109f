"""Argument checks, once, for the reference and the kernels alike.

:func:`check` reads what an :class:`~moetail.spec.operations.Operation` says of its arguments. It
looks at shapes, dtypes, devices and layout only: it reads no tensor value, so it neither
synchronizes a GPU nor disturbs a graph capture; :func:`check_values` does (a route map that must be
the identity, rows that must exist), and is for implementations that may. All raise
:class:`ContractError` and change nothing (DOMAIN-1, DOMAIN-2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from moetail.spec.errors import ContractError
from moetail.spec.operations import Argument, Operation, operation
from moetail.spec.ownership import owned_tokens, tokens_per_rank

__all__ = [
    "HIDDEN_MULTIPLE",
    "MAX_HIDDEN",
    "MAX_TOP_K",
    "MIN_HIDDEN",
    "check",
    "check_values",
    "check_workspace_request",
]

MAX_TOP_K = 32
MIN_HIDDEN = 256
MAX_HIDDEN = 8192
HIDDEN_MULTIPLE = 256

_DOMAIN = "DOMAIN-1"
_UNFINALIZED = ("gemm2_permuted", "expert_weights", "expanded_idx_to_permuted_idx")
_WORKSPACE = ("world_size", "rank", "hidden_size", "max_tokens")


def check(name: str | Operation, call: Mapping[str, Any]) -> None:
    """Refuse arguments outside the domain of an operation that computes.

    Args:
        name: the operation, or its name.
        call: its arguments by name, defaults included; what is none of them is not looked at, so
            that a function may pass its ``locals()``.

    Every argument of a distributed operation that is looked at is replicated, or has the same shape
    on all ranks of a conforming program, so that all ranks refuse together and none waits for the
    others.

    Raises:
        ContractError: the first argument that is not as the operation says, with its name, what
            was found and what is allowed (DOMAIN-1, PACK-1, PACK-3).
    """
    item = operation(name)
    if item.takes("map"):
        _holder(item, call)
    finalized = isinstance(getattr(call.get("x"), "routed", None), Tensor)
    tensors: dict[str, Tensor] = {}
    for argument in item.arguments:
        if argument.role == "finalized" and not finalized:
            continue
        if finalized and argument.role in ("rows", "weights", "map"):
            continue
        value = argument.of(call)
        if value is None and argument.optional:
            continue
        if argument.needs and item.argument(argument.needs).of(call) is None:
            found = f"None, with a {argument.name}"
            raise ContractError(_DOMAIN, argument.needs, found, "a number, or neither")
        if argument.role == "next_weight" and call.get("next_eps") is None:
            continue
        _KINDS[argument.kind](argument, value)
        if argument.kind == "tensor":
            tensors[argument.role] = value
    _sizes(item, call, tensors)
    _same_device(item, tensors)
    if "output" in tensors:
        _disjoint(item, tensors)


# --- one argument ---------------------------------------------------------------------------------


def _tensor(argument: Argument, value: Any) -> None:
    """A contiguous tensor of one of the dtypes and of that rank."""
    name, rank = argument.name, len(argument.shape)
    if not isinstance(value, Tensor):
        raise ContractError(_DOMAIN, name, type(value).__name__, "a tensor")
    if value.dtype not in argument.dtypes:
        allowed = " or ".join(str(dtype) for dtype in argument.dtypes)
        raise ContractError(_DOMAIN, name, str(value.dtype), allowed)
    if value.dim() != rank:
        found = f"rank {value.dim()} {_shape(value)}"
        raise ContractError(argument.layout, name, found, f"rank {rank}")
    if not value.is_contiguous():
        found = f"shape {_shape(value)} with strides {list(value.stride())}"
        raise ContractError(argument.layout, name, found, "contiguous")


def _number(argument: Argument, value: Any) -> None:
    _is_number(argument.name, value)


def _eps(argument: Argument, value: Any) -> None:
    _is_number(argument.name, value)
    if not (math.isfinite(value) and value >= 0.0):
        raise ContractError(_DOMAIN, argument.name, repr(value), "a finite number >= 0")


def _pair(argument: Argument, value: Any) -> None:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        allowed = "None or (x_scale, r_scale)"
        raise ContractError(_DOMAIN, argument.name, repr(value), allowed)
    for number, part in enumerate(value):
        _is_number(f"{argument.name}[{number}]", part)


def _choice(argument: Argument, value: Any) -> None:
    if value not in argument.choices:
        allowed = ", ".join(("None", *map(repr, argument.choices)))
        raise ContractError(_DOMAIN, argument.name, repr(value), allowed)


def _workspace(argument: Argument, value: Any) -> None:
    for field in _WORKSPACE:
        if not hasattr(value, field):
            found = f"{type(value).__name__} without {field}"
            raise ContractError(_DOMAIN, argument.name, found, "a BeamAllReduceWorkspace")


def _other(argument: Argument, value: Any) -> None:
    raise TypeError(f"{argument.name} belongs to an operation that does not compute")


_KINDS = {
    "tensor": _tensor,
    "number": _number,
    "eps": _eps,
    "pair": _pair,
    "choice": _choice,
    "workspace": _workspace,
    "other": _other,
}


def _is_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ContractError(_DOMAIN, name, f"{value!r} ({type(value).__name__})", "a number")


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def _holder(item: Operation, call: Mapping[str, Any]) -> None:
    """x has the fields of its class, whatever class it is of: engines have their own."""
    x = call.get("x")
    needed: tuple[str, ...] = _UNFINALIZED
    if item.permuted:
        for field in ("routed", "shared_output", "routed_scaling_factor"):
            if not hasattr(x, field):
                raise ContractError(_DOMAIN, "x", type(x).__name__, "a MoEOutput")
        x, needed = x.routed, (*_UNFINALIZED, "route_major")  # type: ignore[union-attr]
        if isinstance(x, Tensor):
            return
    if not all(hasattr(x, field) for field in needed):
        name, allowed = "x", "an UnfinalizedMoEOutput"
        if item.permuted:
            name, allowed = "x.routed", f"a tensor or {allowed}"
        raise ContractError(_DOMAIN, name, type(x).__name__, allowed)


# --- how arguments agree --------------------------------------------------------------------------


def _sizes(item: Operation, call: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """K and H within their bounds, and every axis as long as the operation says."""
    counting = "finalized" if "finalized" in tensors else item.counts
    sizes = {"T": tensors[counting].shape[0]}
    for role, tensor in tensors.items():
        argument = item.argument(role)
        for axis, size in zip(argument.shape, tensor.shape, strict=True):
            if axis in ("K", "H") and axis not in sizes:
                sizes[axis] = size
                _bound(item, argument.name, axis, size)
    sizes["slots"] = sizes["T"]
    if item.takes("workspace"):
        workspace = item.argument("workspace").of(call)
        _served(workspace, sizes)
        sizes["slots"] = tokens_per_rank(sizes["T"], workspace.world_size)
    for role, tensor in tensors.items():
        _axes(item.argument(role), tensor, sizes)
    routed = getattr(call.get("x"), "routed", None)
    if getattr(routed, "route_major", False) and "map" in tensors:
        rows, routes = tensors["rows"].shape[0], tensors["map"].numel()
        if rows != routes:
            allowed = f"T * top_k = {routes} rows, as the output is route-major"
            raise ContractError("PACK-3", item.argument("rows").name, f"{rows} rows", allowed)


def _bound(item: Operation, name: str, axis: str, size: int) -> None:
    most_k = MAX_TOP_K if item.bounded else None
    if axis == "K" and (size < 1 or (most_k is not None and size > most_k)):
        allowed = "top_k >= 1" if most_k is None else f"1 <= top_k <= {most_k}"
        raise ContractError(_DOMAIN, name, f"top_k {size}", allowed)
    if axis != "H":
        return
    if item.bounded:
        fits = MIN_HIDDEN <= size <= MAX_HIDDEN and size % HIDDEN_MULTIPLE == 0
        allowed = f"{MIN_HIDDEN} <= H <= {MAX_HIDDEN}, H a multiple of {HIDDEN_MULTIPLE}"
    else:
        fits, allowed = size >= 1, "H >= 1"
    if not fits:
        raise ContractError(_DOMAIN, name, f"H = {size}", allowed)


def _served(workspace: Any, sizes: Mapping[str, int]) -> None:
    """The workspace was made for this H and for so many tokens."""
    if workspace.hidden_size != sizes["H"]:
        found = f"hidden_size {workspace.hidden_size}, H = {sizes['H']}"
        raise ContractError(_DOMAIN, "workspace", found, "H == workspace.hidden_size")
    if sizes["T"] > workspace.max_tokens:
        allowed = f"at most workspace.max_tokens = {workspace.max_tokens}"
        raise ContractError(_DOMAIN, "residual", f"{sizes['T']} tokens", allowed)


def _axes(argument: Argument, tensor: Tensor, sizes: Mapping[str, int]) -> None:
    """A tensor's axes are as long as they must be, or long enough."""
    axes = list(zip(argument.shape, tensor.shape, strict=True))
    if any(size != sizes[axis] for axis, size in axes if axis in ("T", "K", "H")):
        names = (str(sizes[axis]) if axis in ("T", "K", "H") else axis for axis in argument.shape)
        raise ContractError(_DOMAIN, argument.name, _shape(tensor), f"[{', '.join(names)}]")
    for axis, size in axes:
        if axis == "slots * K":
            if size % sizes["K"]:
                allowed = f"a multiple of top_k {sizes['K']}"
                raise ContractError(_DOMAIN, argument.name, f"{size} rows", allowed)
            size //= sizes["K"]
        if axis.startswith("slots") and size < sizes["slots"]:
            found = f"{size} token slots"
            raise ContractError(_DOMAIN, argument.name, found, f"at least {sizes['slots']}")


def _same_device(item: Operation, tensors: Mapping[str, Tensor]) -> None:
    first_role, first = next(iter(tensors.items()))
    for role, tensor in tensors.items():
        if tensor.device != first.device:
            allowed = f"{first.device}, where {item.argument(first_role).name} is"
            raise ContractError(_DOMAIN, item.argument(role).name, str(tensor.device), allowed)


def _span(tensor: Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    return start, start + tensor.numel() * tensor.element_size()


def _disjoint(item: Operation, tensors: Mapping[str, Tensor]) -> None:
    """A destination that overlaps an input would make the call modify its inputs (RUN-2)."""
    output = tensors["output"]
    if output.is_meta or torch.compiler.is_compiling():
        return  # no addresses to compare; a traced call was checked, or will be, when it runs
    low, high = _span(output)
    for role, other in tensors.items():
        if other is output or other.is_meta:
            continue
        other_low, other_high = _span(other)
        if low < other_high and other_low < high:
            found = f"memory shared with {item.argument(role).name}"
            raise ContractError(_DOMAIN, "output", found, "memory of its own")


def check_workspace_request(hidden_size: int, max_tokens: int) -> None:
    """Sizes that a workspace can be created for at all."""
    for name, value, least in (("hidden_size", hidden_size, 1), ("max_tokens", max_tokens, 0)):
        if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
            raise ContractError(_DOMAIN, name, repr(value), f"an integer >= {least}")


def check_values(name: str | Operation, call: Mapping[str, Any]) -> None:
    """Refuse a map whose values are wrong: for implementations that may read them.

    It synchronizes a GPU, and does nothing while a compiler traces.

    Args:
        name, call: as :func:`check` takes them, which has found them legal.

    Raises:
        ContractError: a map that names rows that do not exist, that is not the identity where it
            must be (DOMAIN-1), or not route-major where it says so (PACK-3).
    """
    item = operation(name)
    argument = item.find("map")
    index = argument.of(call) if argument else None
    if argument is None or index is None or torch.compiler.is_compiling():
        return
    rule, identity = "DOMAIN-1", item.capacity
    if item.capacity:
        index = index[: _live(item, call)]
        wrong = torch.zeros_like(index, dtype=torch.bool)
        allowed = "the identity: token-major rows"
    else:
        rows = item.argument("rows").of(call).shape[0]
        wrong = (index < -1) | (index >= rows)
        allowed = f"-1 or a row below {rows}"
        if call["x"].routed.route_major:
            rule, identity = "PACK-3", True
            allowed = "-1 or t * top_k + k, as the output is route-major"
    if identity:
        expected = torch.arange(index.numel(), dtype=index.dtype, device=index.device)
        other = index != expected.view_as(index)
        wrong |= other if item.capacity else other & (index >= 0)
    if bool(wrong.any()):
        token, slot = (int(i) for i in wrong.nonzero()[0])
        place = f"{argument.name}[{token}, {slot}]"
        raise ContractError(rule, place, str(int(index[token, slot])), allowed)


def _live(item: Operation, call: Mapping[str, Any]) -> int:
    """How many of this rank's token slots are live."""
    tokens: int = item.argument(item.counts).of(call).shape[0]
    if not item.takes("workspace"):
        return tokens
    workspace = item.argument("workspace").of(call)
    return len(owned_tokens(tokens, workspace.world_size, workspace.rank))
