"""Argument checks, once, for the reference and the kernels alike.

Every ``check_*`` function looks at shapes, dtypes, devices and layout only: it reads no tensor
value, so it neither synchronizes a GPU nor disturbs a graph capture. Checks of values (a route map
that must be the identity, rows that must exist) are ``check_*_values`` and are for implementations
that may read them. All raise :class:`ContractError` and change nothing (DOMAIN-1, DOMAIN-2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, Protocol

import torch
from torch import Tensor

from moetail.spec.errors import ContractError
from moetail.spec.ownership import tokens_per_rank
from moetail.spec.types import MoEOutput, UnfinalizedMoEOutput

__all__ = [
    "GATHER_STRATEGIES",
    "HIDDEN_MULTIPLE",
    "LOCAL_STRATEGIES",
    "MAX_HIDDEN",
    "MAX_TOP_K",
    "MIN_HIDDEN",
    "WEIGHT_DTYPES",
    "check_allreduce",
    "check_boundary",
    "check_finalize",
    "check_fused",
    "check_gather",
    "check_identity_values",
    "check_moe_output",
    "check_moe_output_values",
    "check_workspace_request",
]

MAX_TOP_K = 32
MIN_HIDDEN = 256
MAX_HIDDEN = 8192
HIDDEN_MULTIPLE = 256
WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LOCAL_STRATEGIES = ("fused", "unfused")
GATHER_STRATEGIES = ("oneshot", "twoshot", "unfused")

_DOMAIN = "DOMAIN-1"
_UNFINALIZED = ("gemm2_permuted", "expert_weights", "expanded_idx_to_permuted_idx")


class _WorkspaceFields(Protocol):
    world_size: int
    rank: int
    hidden_size: int
    max_tokens: int


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def _tensor(
    name: str,
    value: Any,
    *,
    dtypes: Sequence[torch.dtype],
    rank: int,
    layout: str = _DOMAIN,
) -> Tensor:
    """A contiguous tensor of one of the dtypes and of that rank, or a refusal.

    ``layout`` is the rule that a wrong rank or stride breaks: PACK-1 for expert rows.
    """
    if not isinstance(value, Tensor):
        raise ContractError(_DOMAIN, name, f"{type(value).__name__}", "a tensor")
    if value.dtype not in dtypes:
        allowed = " or ".join(str(dtype) for dtype in dtypes)
        raise ContractError(_DOMAIN, name, str(value.dtype), allowed)
    if value.dim() != rank:
        found = f"rank {value.dim()} {_shape(value)}"
        raise ContractError(layout, name, found, f"rank {rank}")
    if not value.is_contiguous():
        found = f"shape {_shape(value)} with strides {list(value.stride())}"
        raise ContractError(layout, name, found, "contiguous")
    return value


def _bf16(name: str, value: Any, *, rank: int) -> Tensor:
    return _tensor(name, value, dtypes=(torch.bfloat16,), rank=rank)


def _rows(name: str, value: Any, *, rank: int) -> Tensor:
    """Expert rows, which a consumer indexes as they lie: densely packed at H (PACK-1)."""
    return _tensor(name, value, dtypes=(torch.bfloat16,), rank=rank, layout="PACK-1")


def _same_device(**tensors: Tensor | None) -> None:
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    first_name, first = next(iter(present.items()))
    for name, tensor in present.items():
        if tensor.device != first.device:
            raise ContractError(
                _DOMAIN, name, str(tensor.device), f"{first.device}, where {first_name} is"
            )


def _span(tensor: Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    return start, start + tensor.numel() * tensor.element_size()


def _disjoint(name: str, output: Tensor, **inputs: Tensor | None) -> None:
    """A destination that overlaps an input would make the call modify its inputs (RUN-2)."""
    if output.is_meta or torch.compiler.is_compiling():
        return  # no addresses to compare; a traced call was checked, or will be, when it runs
    low, high = _span(output)
    for other_name, other in inputs.items():
        if other is None or other.is_meta or other.device != output.device:
            continue
        other_low, other_high = _span(other)
        if low < other_high and other_low < high:
            raise ContractError(
                _DOMAIN, name, f"memory shared with {other_name}", "memory of its own"
            )


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ContractError(_DOMAIN, name, f"{value!r} ({type(value).__name__})", "a number")
    return float(value)


def _eps(name: str, value: Any) -> None:
    eps = _number(name, value)
    if not (math.isfinite(eps) and eps >= 0.0):
        raise ContractError(_DOMAIN, name, repr(value), "a finite number >= 0")


def _norm(kind: str, weight: Any, eps: Any, hidden_size: int) -> Tensor | None:
    """A norm's pair of arguments: eps None means no norm, a weight needs an eps."""
    if eps is None:
        # Only the post-norm's weight needs its eps: whether there is a next norm is said by
        # next_eps alone, and a layer may pass the weight it holds all the same.
        if weight is not None and kind == "post":
            raise ContractError(
                _DOMAIN, f"{kind}_eps", f"None, with a {kind}_weight", "a number, or neither"
            )
        return None
    _eps(f"{kind}_eps", eps)
    if weight is None:
        return None
    _bf16(f"{kind}_weight", weight, rank=1)
    if weight.shape[0] != hidden_size:
        raise ContractError(_DOMAIN, f"{kind}_weight", _shape(weight), f"[H] = [{hidden_size}]")
    return weight  # type: ignore[no-any-return]


def _top_k(name: str, top_k: int) -> None:
    if not 1 <= top_k <= MAX_TOP_K:
        raise ContractError(_DOMAIN, name, f"top_k {top_k}", f"1 <= top_k <= {MAX_TOP_K}")


def _hidden(name: str, hidden_size: int) -> None:
    if not (MIN_HIDDEN <= hidden_size <= MAX_HIDDEN and hidden_size % HIDDEN_MULTIPLE == 0):
        raise ContractError(
            _DOMAIN,
            name,
            f"H = {hidden_size}",
            f"{MIN_HIDDEN} <= H <= {MAX_HIDDEN}, H a multiple of {HIDDEN_MULTIPLE}",
        )


def _scales(scales: Any) -> None:
    if scales is None:
        return
    if not isinstance(scales, (tuple, list)) or len(scales) != 2:
        raise ContractError(_DOMAIN, "scales", repr(scales), "None or (x_scale, r_scale)")
    for name, scale in zip(("scales[0]", "scales[1]"), scales, strict=True):
        _number(name, scale)


def _strategy(strategy: Any, allowed: Sequence[str]) -> None:
    if strategy is not None and strategy not in allowed:
        raise ContractError(
            _DOMAIN, "strategy", repr(strategy), ", ".join(("None", *map(repr, allowed)))
        )


def check_finalize(
    expert_outputs: Tensor,
    expert_weights: Tensor,
    output: Tensor,
    routed_scale: float,
    post_weight: Tensor | None,
    post_eps: float | None,
) -> None:
    """The domain of ``beam_moe_finalize``."""
    rows = _rows("expert_outputs", expert_outputs, rank=3)
    weights = _tensor("expert_weights", expert_weights, dtypes=(torch.float32,), rank=2)
    destination = _bf16("output", output, rank=2)
    capacity, top_k, hidden_size = rows.shape
    live = destination.shape[0]
    _top_k("expert_outputs", top_k)
    _hidden("expert_outputs", hidden_size)
    if destination.shape[1] != hidden_size:
        raise ContractError(_DOMAIN, "output", _shape(destination), f"[live, {hidden_size}]")
    if live > capacity:
        raise ContractError(
            _DOMAIN, "output", f"{live} live rows", f"at most the {capacity} of expert_outputs"
        )
    if weights.shape[1] != top_k or weights.shape[0] < live:
        raise ContractError(_DOMAIN, "expert_weights", _shape(weights), f"[>= {live}, {top_k}]")
    _number("routed_scale", routed_scale)
    post = _norm("post", post_weight, post_eps, hidden_size)
    _same_device(expert_outputs=rows, expert_weights=weights, output=destination, post_weight=post)
    _disjoint("output", destination, expert_outputs=rows, expert_weights=weights, post_weight=post)


def _boundary_tail(
    residual: Tensor,
    post_weight: Any,
    post_eps: Any,
    next_weight: Any,
    next_eps: Any,
    scales: Any,
) -> dict[str, Tensor | None]:
    """Checks of what every boundary takes beside x; returns its tensors by name."""
    hidden_size = residual.shape[1]
    post = _norm("post", post_weight, post_eps, hidden_size)
    following = _norm("next", next_weight, next_eps, hidden_size)
    _scales(scales)
    return {"residual": residual, "post_weight": post, "next_weight": following}


def check_boundary(
    x: Tensor,
    residual: Tensor,
    post_weight: Tensor | None,
    post_eps: float | None,
    next_weight: Tensor | None,
    next_eps: float | None,
    scales: tuple[float, float] | None,
) -> None:
    """The domain of ``beam_norm_residual_norm``: any H >= 1, since no source bounds it."""
    _bf16("x", x, rank=2)
    _bf16("residual", residual, rank=2)
    if x.shape != residual.shape:
        raise ContractError(_DOMAIN, "residual", _shape(residual), f"x's shape {_shape(x)}")
    if x.shape[1] < 1:
        raise ContractError(_DOMAIN, "x", _shape(x), "[T, H >= 1]")
    tail = _boundary_tail(residual, post_weight, post_eps, next_weight, next_eps, scales)
    _same_device(x=x, **tail)


def _identity_rows(x: Any) -> tuple[Tensor, Tensor, Tensor, int]:
    """An unfinalized output whose rows view as ``[capacity, K, H]``: (rows, weights, map, K)."""
    for name in _UNFINALIZED:
        if not hasattr(x, name):
            raise ContractError(_DOMAIN, "x", type(x).__name__, "an UnfinalizedMoEOutput")
    rows = _rows("x.gemm2_permuted", x.gemm2_permuted, rank=2)
    weights = _tensor("x.expert_weights", x.expert_weights, dtypes=(torch.float32,), rank=2)
    index = _tensor(
        "x.expanded_idx_to_permuted_idx",
        x.expanded_idx_to_permuted_idx,
        dtypes=(torch.int32,),
        rank=2,
    )
    top_k = weights.shape[1]
    _top_k("x.expert_weights", top_k)
    _hidden("x.gemm2_permuted", rows.shape[1])
    if rows.shape[0] % top_k:
        raise ContractError(
            _DOMAIN, "x.gemm2_permuted", f"{rows.shape[0]} rows", f"a multiple of top_k {top_k}"
        )
    if index.shape[1] != top_k:
        raise ContractError(
            _DOMAIN, "x.expanded_idx_to_permuted_idx", _shape(index), f"[>= live, {top_k}]"
        )
    return rows, weights, index, top_k


def _slots(live: int, rows: Tensor, weights: Tensor, index: Tensor, top_k: int) -> None:
    """At least ``live`` token slots in each of the three tensors."""
    for name, slots in (
        ("x.gemm2_permuted", rows.shape[0] // top_k),
        ("x.expert_weights", weights.shape[0]),
        ("x.expanded_idx_to_permuted_idx", index.shape[0]),
    ):
        if slots < live:
            raise ContractError(_DOMAIN, name, f"{slots} token slots", f"at least {live}")


def _residual(residual: Any, hidden_size: int) -> Tensor:
    tensor = _bf16("residual", residual, rank=2)
    if tensor.shape[1] != hidden_size:
        raise ContractError(_DOMAIN, "residual", _shape(tensor), f"[T, {hidden_size}]")
    return tensor


def check_fused(
    x: UnfinalizedMoEOutput,
    residual: Tensor,
    post_weight: Tensor | None,
    post_eps: float | None,
    next_weight: Tensor | None,
    next_eps: float | None,
    scales: tuple[float, float] | None,
    routed_scale: float,
    strategy: str | None,
) -> None:
    """The domain of ``beam_moe_finalize_norm_residual_norm``, apart from the map's values."""
    _strategy(strategy, LOCAL_STRATEGIES)
    rows, weights, index, top_k = _identity_rows(x)
    residual = _residual(residual, rows.shape[1])
    _slots(residual.shape[0], rows, weights, index, top_k)
    _number("routed_scale", routed_scale)
    tail = _boundary_tail(residual, post_weight, post_eps, next_weight, next_eps, scales)
    _same_device(gemm2_permuted=rows, expert_weights=weights, index=index, **tail)


def _workspace(workspace: Any, num_tokens: int, hidden_size: int) -> None:
    for field in ("world_size", "rank", "hidden_size", "max_tokens"):
        if not hasattr(workspace, field):
            found = f"{type(workspace).__name__} without {field}"
            raise ContractError(_DOMAIN, "workspace", found, "a BeamAllReduceWorkspace")
    if workspace.hidden_size != hidden_size:
        raise ContractError(
            _DOMAIN,
            "workspace",
            f"hidden_size {workspace.hidden_size}, H = {hidden_size}",
            "H == workspace.hidden_size",
        )
    if num_tokens > workspace.max_tokens:
        raise ContractError(
            _DOMAIN,
            "residual",
            f"{num_tokens} tokens",
            f"at most workspace.max_tokens = {workspace.max_tokens}",
        )


def check_gather(
    x: UnfinalizedMoEOutput,
    residual: Tensor,
    post_weight: Tensor | None,
    post_eps: float | None,
    next_weight: Tensor | None,
    next_eps: float | None,
    scales: tuple[float, float] | None,
    workspace: _WorkspaceFields,
    routed_scale: float,
    strategy: str | None,
) -> None:
    """The domain of ``beam_moe_finalize_gather_norm_residual_norm``, apart from the map's values.

    Every argument it looks at but x is replicated, and x's shape is the same on all ranks in a
    conforming program, so that all ranks refuse together and none waits for the others.
    """
    _strategy(strategy, GATHER_STRATEGIES)
    rows, weights, index, top_k = _identity_rows(x)
    residual = _residual(residual, rows.shape[1])
    num_tokens = residual.shape[0]
    _workspace(workspace, num_tokens, rows.shape[1])
    slots = tokens_per_rank(num_tokens, workspace.world_size)
    _slots(slots, rows, weights, index, top_k)
    _number("routed_scale", routed_scale)
    tail = _boundary_tail(residual, post_weight, post_eps, next_weight, next_eps, scales)
    _same_device(gemm2_permuted=rows, expert_weights=weights, index=index, **tail)


def check_moe_output(x: MoEOutput) -> None:
    """What ``finalize_moe_output`` takes, but for the map's values: any H >= 1 and top_k >= 1."""
    for field in ("routed", "shared_output", "routed_scaling_factor"):
        if not hasattr(x, field):
            raise ContractError(_DOMAIN, "x", type(x).__name__, "a MoEOutput")
    _number("x.routed_scaling_factor", x.routed_scaling_factor)
    routed = x.routed
    tensors: dict[str, Tensor | None]
    if isinstance(routed, Tensor):
        finalized = _bf16("x.routed", routed, rank=2)
        num_tokens, hidden_size = finalized.shape
        tensors = {"routed": finalized}
    else:
        for field in (*_UNFINALIZED, "route_major"):
            if not hasattr(routed, field):
                found = type(routed).__name__
                allowed = "a tensor or an UnfinalizedMoEOutput"
                raise ContractError(_DOMAIN, "x.routed", found, allowed)
        rows = _rows("x.routed.gemm2_permuted", routed.gemm2_permuted, rank=2)
        weights = _tensor(
            "x.routed.expert_weights", routed.expert_weights, dtypes=WEIGHT_DTYPES, rank=2
        )
        index = _tensor(
            "x.routed.expanded_idx_to_permuted_idx",
            routed.expanded_idx_to_permuted_idx,
            dtypes=(torch.int32,),
            rank=2,
        )
        if index.shape != weights.shape or weights.shape[1] < 1:
            raise ContractError(
                _DOMAIN,
                "x.routed.expanded_idx_to_permuted_idx",
                _shape(index),
                f"[T, top_k >= 1], expert_weights' shape {_shape(weights)}",
            )
        num_tokens, hidden_size = weights.shape[0], rows.shape[1]
        if routed.route_major and rows.shape[0] != weights.numel():
            raise ContractError(
                "PACK-3",
                "x.routed.gemm2_permuted",
                f"{rows.shape[0]} rows",
                f"T * top_k = {weights.numel()} rows, as the output is route-major",
            )
        tensors = {"gemm2_permuted": rows, "expert_weights": weights, "index": index}
    if hidden_size < 1:
        raise ContractError(_DOMAIN, "x.routed", f"H = {hidden_size}", "H >= 1")
    if x.shared_output is not None:
        shared = _bf16("x.shared_output", x.shared_output, rank=2)
        if tuple(shared.shape) != (num_tokens, hidden_size):
            raise ContractError(
                _DOMAIN, "x.shared_output", _shape(shared), f"[{num_tokens}, {hidden_size}]"
            )
        tensors["shared_output"] = shared
    _same_device(**tensors)


def check_allreduce(
    x: MoEOutput,
    residual: Tensor,
    post_weight: Tensor | None,
    post_eps: float | None,
    next_weight: Tensor | None,
    next_eps: float | None,
    scales: tuple[float, float] | None,
    workspace: _WorkspaceFields,
) -> None:
    """What ``beam_finalize_allreduce_norm_residual_norm`` takes, apart from the map's values."""
    check_moe_output(x)
    source = x.routed if isinstance(x.routed, Tensor) else x.routed.gemm2_permuted
    num_tokens = (
        x.routed.shape[0] if isinstance(x.routed, Tensor) else x.routed.expert_weights.shape[0]
    )
    residual = _residual(residual, source.shape[1])
    if residual.shape[0] != num_tokens:
        raise ContractError(
            _DOMAIN, "residual", _shape(residual), f"[{num_tokens}, {source.shape[1]}]"
        )
    _workspace(workspace, num_tokens, source.shape[1])
    tail = _boundary_tail(residual, post_weight, post_eps, next_weight, next_eps, scales)
    _same_device(routed=source, **tail)


def check_workspace_request(hidden_size: int, max_tokens: int) -> None:
    """Sizes that a workspace can be created for at all."""
    for name, value, least in (("hidden_size", hidden_size, 1), ("max_tokens", max_tokens, 0)):
        if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
            raise ContractError(_DOMAIN, name, repr(value), f"an integer >= {least}")


def check_identity_values(x: UnfinalizedMoEOutput, live: int) -> None:
    """The map of the live slots is the identity. Reads values: synchronizes a GPU."""
    index = x.expanded_idx_to_permuted_idx[:live]
    expected = torch.arange(index.numel(), dtype=torch.int32, device=index.device)
    wrong = index.flatten() != expected
    if bool(wrong.any()):
        route = int(wrong.nonzero()[0])
        token, slot = divmod(route, index.shape[1])
        raise ContractError(
            _DOMAIN,
            f"x.expanded_idx_to_permuted_idx[{token}, {slot}]",
            str(int(index[token, slot])),
            f"{route}: Beam operations take token-major rows and the identity map",
        )


def check_moe_output_values(x: MoEOutput) -> None:
    """The map names existing rows, and is route-major where it says so. Synchronizes a GPU."""
    routed = x.routed
    if isinstance(routed, Tensor):
        return
    index = routed.expanded_idx_to_permuted_idx
    rows = routed.gemm2_permuted.shape[0]
    wrong = (index < -1) | (index >= rows)
    rule, allowed = "DOMAIN-1", f"-1 or a row below {rows}"
    if routed.route_major:
        identity = torch.arange(index.numel(), dtype=index.dtype, device=index.device)
        wrong |= (index >= 0) & (index != identity.view_as(index))
        rule, allowed = "PACK-3", "-1 or t * top_k + k, as the output is route-major"
    if bool(wrong.any()):
        token, slot = (int(i) for i in wrong.nonzero()[0])
        raise ContractError(
            rule,
            f"x.routed.expanded_idx_to_permuted_idx[{token}, {slot}]",
            str(int(index[token, slot])),
            allowed,
        )
