"""Changes to a case's arguments, by name: arguments that must be refused, and layouts that must not
matter.

A variation is part of what a failing check prints, so names never change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moetail.conformance.cases import Case
from moetail.conformance.cases.tensors import mapped
from moetail.spec import UnfinalizedMoEOutput
from moetail.spec.rules import (
    ALLREDUCE,
    BOUNDARY,
    FINALIZE,
    FUSED,
    GATHER,
    MOE_OUTPUT,
)

__all__ = ["REFUSALS", "Refusal", "apply", "refusals"]

Arguments = dict[str, Any]
Change = Callable[[Case, int, Arguments], Arguments]


@dataclass(frozen=True)
class Refusal:
    """Arguments that the contract refuses.

    Attributes:
        name: its name in ids.
        rule: the rule that refuses.
        argument: what is wrong, for people.
        change: makes legal arguments illegal.
        needs: restricts the cases it applies to.
    """

    name: str
    rule: str
    argument: str
    change: Change
    needs: Callable[[Case], bool] = lambda case: True


def _set(arguments: Arguments, path: str, change: Callable[[Any], Any]) -> Arguments:
    """``arguments`` with the item at a dotted path replaced."""
    name, _, rest = path.partition(".")
    if not rest:
        return {**arguments, name: change(arguments[name])}

    def inner(value: Any, path: str) -> Any:
        name, _, rest = path.partition(".")
        current = getattr(value, name)
        return dataclasses.replace(
            value, **{name: inner(current, rest) if rest else change(current)}
        )

    return {**arguments, name: inner(arguments[name], rest)}


def _on(path: str, change: Callable[[Tensor], Any]) -> Change:
    return lambda case, rank, arguments: _set(arguments, path, change)


def _put(name: str, value: Any) -> Change:
    return lambda case, rank, arguments: {**arguments, name: value}


def _resized(hidden: int | Callable[[int], int]) -> Change:
    """The same call at another H: every tensor that ends in H is cut or repeated to it."""

    def change(case: Case, rank: int, arguments: Arguments) -> Arguments:
        size = hidden if isinstance(hidden, int) else hidden(case.hidden)

        def resize(tensor: Tensor) -> Tensor:
            if tensor.dim() == 0 or tensor.shape[-1] != case.hidden:
                return tensor
            copies = -(-size // case.hidden)
            return torch.cat([tensor] * copies, dim=-1)[..., :size].contiguous()

        changed: Arguments = mapped(arguments, resize)
        return changed

    return change


def _strided(tensor: Tensor) -> Tensor:
    """The same values in a buffer whose rows are twice as far apart."""
    wide = torch.cat([tensor, tensor], dim=-1)
    return wide[..., : tensor.shape[-1]]


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def _more_rows(count: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: torch.cat([tensor, tensor[:1].expand(count, *tensor.shape[1:])])


def _wider(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor[..., -1:]], dim=-1)


def _to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(dtype)


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta")


def _has_tokens(case: Case) -> bool:
    return case.tokens > 1


def _few(case: Case) -> bool:
    return 1 < case.tokens * case.top_k <= 64


def _routes(case: Case) -> bool:
    return case.routed == "routes" and case.tokens > 1


def _post_weight(case: Case) -> bool:
    return case.post == "affine"


def _finalize_more_live(case: Case, rank: int, arguments: Arguments) -> Arguments:
    extra = case.capacity + 1
    arguments = _set(arguments, "output", _more_rows(extra))
    return _set(arguments, "expert_weights", _more_rows(extra))


def _finalize_top_k_33(case: Case, rank: int, arguments: Arguments) -> Arguments:
    def widen(tensor: Tensor) -> Tensor:
        copies = -(-33 // tensor.shape[1])
        return torch.cat([tensor] * copies, dim=1)[:, :33].contiguous()

    return _set(_set(arguments, "expert_outputs", widen), "expert_weights", widen)


def _identity_top_k_33(case: Case, rank: int, arguments: Arguments) -> Arguments:
    x: UnfinalizedMoEOutput = arguments["x"]
    slots, top_k = x.expert_weights.shape
    copies = -(-33 // top_k)
    hidden = x.gemm2_permuted.shape[1]
    rows = torch.cat([x.gemm2_permuted.view(slots, top_k, hidden)] * copies, dim=1)[:, :33]
    weights = torch.cat([x.expert_weights] * copies, dim=1)[:, :33]
    index = torch.arange(slots * 33, dtype=torch.int32, device=rows.device).view(slots, 33)
    wide = UnfinalizedMoEOutput(
        rows.reshape(slots * 33, hidden), weights.contiguous(), index, x.route_major
    )
    return {**arguments, "x": wide}


def _fewer_slots(case: Case, rank: int, arguments: Arguments) -> Arguments:
    """One token slot fewer than the call needs, on every rank."""
    x: UnfinalizedMoEOutput = arguments["x"]
    needed = -(-case.tokens // case.ranks)
    slots = needed - 1
    top_k = x.expert_weights.shape[1]
    cut = UnfinalizedMoEOutput(
        x.gemm2_permuted[: slots * top_k].contiguous(),
        x.expert_weights[:slots].contiguous(),
        x.expanded_idx_to_permuted_idx[:slots].contiguous(),
        x.route_major,
    )
    return {**arguments, "x": cut}


def _hidden_refusals() -> list[Refusal]:
    return [
        Refusal("hidden-128", "DOMAIN-1", "H = 128", _resized(128), _has_tokens),
        Refusal(
            "hidden-not-a-multiple",
            "DOMAIN-1",
            "H not a multiple of 256",
            _resized(lambda hidden: hidden + 128),
            _has_tokens,
        ),
        Refusal("hidden-2880", "DOMAIN-1", "H = 2880, as gpt-oss has", _resized(2880), _few),
        Refusal("hidden-8448", "DOMAIN-1", "H = 8448", _resized(8448), _few),
    ]


def _rows_refusals(path: str, rank3: bool = False) -> list[Refusal]:
    def folded(tensor: Tensor) -> Tensor:
        return tensor.flatten(0, 1) if rank3 else tensor.unsqueeze(1)

    short = path.rsplit(".", 1)[-1]
    return [
        Refusal("rows-strided", "PACK-1", f"{short}, rows apart", _on(path, _strided), _routes),
        Refusal(
            "rows-transposed", "PACK-1", f"{short}, transposed", _on(path, _transposed), _routes
        ),
        Refusal("rows-of-other-rank", "PACK-1", f"{short}'s rank", _on(path, folded), _routes),
        Refusal(
            "rows-fp16", "DOMAIN-1", f"{short}'s dtype", _on(path, _to(torch.float16)), _routes
        ),
        Refusal(
            "rows-fp32", "DOMAIN-1", f"{short}'s dtype", _on(path, _to(torch.float32)), _routes
        ),
    ]


def _weights_refusals(path: str, dtype: torch.dtype) -> list[Refusal]:
    return [
        Refusal(
            "weights-dtype", "DOMAIN-1", "expert_weights' dtype", _on(path, _to(dtype)), _routes
        ),
        Refusal(
            "weights-too-wide", "DOMAIN-1", "expert_weights' top_k", _on(path, _wider), _routes
        ),
        Refusal(
            "weights-strided",
            "DOMAIN-1",
            "expert_weights, not contiguous",
            _on(path, _strided),
            _routes,
        ),
        Refusal(
            "weights-elsewhere",
            "DOMAIN-1",
            "expert_weights on another device",
            _on(path, _meta),
            _routes,
        ),
    ]


def _residual_refusals() -> list[Refusal]:
    return [
        Refusal(
            "residual-fp32",
            "DOMAIN-1",
            "residual's dtype",
            _on("residual", _to(torch.float32)),
            _has_tokens,
        ),
        Refusal(
            "residual-too-wide", "DOMAIN-1", "residual's H", _on("residual", _wider), _has_tokens
        ),
        Refusal(
            "residual-strided",
            "DOMAIN-1",
            "residual, not contiguous",
            _on("residual", _strided),
            _has_tokens,
        ),
    ]


def _post_refusals() -> list[Refusal]:
    return [
        Refusal(
            "post-weight-without-eps",
            "DOMAIN-1",
            "post_eps None with a post_weight",
            _put("post_eps", None),
            _post_weight,
        ),
        Refusal(
            "post-weight-fp32",
            "DOMAIN-1",
            "post_weight's dtype",
            _on("post_weight", _to(torch.float32)),
            _post_weight,
        ),
        Refusal(
            "post-weight-too-long",
            "DOMAIN-1",
            "post_weight's length",
            _on("post_weight", _wider),
            _post_weight,
        ),
    ]


def _workspace_refusals() -> list[Refusal]:
    return [
        Refusal(
            "other-hidden-size",
            "DOMAIN-1",
            "H other than the workspace's",
            _resized(lambda hidden: hidden + 256),
            _has_tokens,
        ),
        Refusal(
            "past-max-tokens",
            "DOMAIN-1",
            "T > workspace.max_tokens",
            lambda case, rank, arguments: arguments,  # the step's workspace is smaller
            _has_tokens,
        ),
    ]


_MAP = "x.expanded_idx_to_permuted_idx"

REFUSALS: dict[str, tuple[Refusal, ...]] = {
    FINALIZE: (
        *_rows_refusals("expert_outputs", rank3=True),
        *_hidden_refusals(),
        Refusal("top-k-33", "DOMAIN-1", "top_k = 33", _finalize_top_k_33, _few),
        Refusal("live-past-capacity", "DOMAIN-1", "live > capacity", _finalize_more_live, _routes),
        *_weights_refusals("expert_weights", torch.bfloat16),
        Refusal(
            "weights-too-few",
            "DOMAIN-1",
            "expert_weights' tokens",
            lambda case, rank, arguments: _set(
                arguments, "expert_weights", lambda tensor: tensor[: case.tokens - 1].contiguous()
            ),
            _routes,
        ),
        Refusal(
            "output-fp32", "DOMAIN-1", "output's dtype", _on("output", _to(torch.float32)), _routes
        ),
        Refusal("output-too-wide", "DOMAIN-1", "output's H", _on("output", _wider), _routes),
        Refusal(
            "output-strided", "DOMAIN-1", "output, not contiguous", _on("output", _strided), _routes
        ),
        *_post_refusals(),
    ),
    BOUNDARY: (
        Refusal("x-fp32", "DOMAIN-1", "x's dtype", _on("x", _to(torch.float32)), _has_tokens),
        Refusal("x-fp16", "DOMAIN-1", "x's dtype", _on("x", _to(torch.float16)), _has_tokens),
        *_residual_refusals()[:2],
        Refusal(
            "residual-too-long",
            "DOMAIN-1",
            "residual's tokens",
            _on("residual", _more_rows(1)),
            _has_tokens,
        ),
        *_post_refusals(),
    ),
    FUSED: (
        *_rows_refusals("x.gemm2_permuted"),
        *_hidden_refusals(),
        Refusal("top-k-33", "DOMAIN-1", "top_k = 33", _identity_top_k_33, _few),
        Refusal("live-past-capacity", "DOMAIN-1", "live > capacity", _fewer_slots, _routes),
        *_weights_refusals("x.expert_weights", torch.bfloat16),
        Refusal("map-int64", "DOMAIN-1", "the map's dtype", _on(_MAP, _to(torch.int64)), _routes),
        *_residual_refusals(),
        *_post_refusals(),
        Refusal("strategy-unknown", "DOMAIN-1", "strategy 'oneshot'", _put("strategy", "oneshot")),
    ),
    GATHER: (
        *_rows_refusals("x.gemm2_permuted"),
        *_hidden_refusals()[:2],
        Refusal("top-k-33", "DOMAIN-1", "top_k = 33", _identity_top_k_33, _few),
        Refusal("too-few-slots", "DOMAIN-1", "fewer than L slots", _fewer_slots, _routes),
        *_weights_refusals("x.expert_weights", torch.bfloat16),
        Refusal("map-int64", "DOMAIN-1", "the map's dtype", _on(_MAP, _to(torch.int64)), _routes),
        *_residual_refusals(),
        *_post_refusals(),
        Refusal("strategy-unknown", "DOMAIN-1", "strategy 'fused'", _put("strategy", "fused")),
        *_workspace_refusals(),
    ),
    MOE_OUTPUT: (
        *_rows_refusals("x.routed.gemm2_permuted"),
        *_weights_refusals("x.routed.expert_weights", torch.float64),
        Refusal(
            "map-int64",
            "DOMAIN-1",
            "the map's dtype",
            _on("x.routed.expanded_idx_to_permuted_idx", _to(torch.int64)),
            _routes,
        ),
        Refusal(
            "shared-too-wide",
            "DOMAIN-1",
            "shared_output's H",
            _on("x.shared_output", _wider),
            lambda case: case.shared and case.tokens > 1,
        ),
        Refusal(
            "shared-fp32",
            "DOMAIN-1",
            "shared_output's dtype",
            _on("x.shared_output", _to(torch.float32)),
            lambda case: case.shared and case.tokens > 1,
        ),
    ),
    ALLREDUCE: (
        *_rows_refusals("x.routed.gemm2_permuted"),
        *_weights_refusals("x.routed.expert_weights", torch.float64),
        *_residual_refusals(),
        *_post_refusals(),
        *_workspace_refusals(),
    ),
}


def refusals(operation: str, rules: tuple[str, ...], case: Case) -> tuple[Refusal, ...]:
    """The refusals of an operation by those rules that apply to a case."""
    return tuple(
        refusal
        for refusal in REFUSALS.get(operation, ())
        if refusal.rule in rules and refusal.needs(case)
    )


# --- what must not matter ------------------------------------------------------------------------

PAST_INT32 = 1 << 31


def _unfinalized(arguments: Arguments) -> tuple[str, UnfinalizedMoEOutput]:
    x = arguments["x"]
    return ("x.routed", x.routed) if hasattr(x, "routed") else ("x", x)


def _permute_rows(case: Case, rank: int, arguments: Arguments) -> Arguments:
    """Rows and map permuted together (ROUTE-2)."""
    path, x = _unfinalized(arguments)
    rows, index = x.gemm2_permuted, x.expanded_idx_to_permuted_idx
    gen = torch.Generator().manual_seed(case.seed + 1000003 * rank)
    order = torch.randperm(rows.shape[0], generator=gen).to(rows.device)
    place = torch.empty_like(order)
    place[order] = torch.arange(rows.shape[0], device=rows.device)
    moved = torch.where(index >= 0, place[index.clamp(min=0).long()].to(index.dtype), index)
    changed = dataclasses.replace(
        x,
        gemm2_permuted=rows[order],
        expanded_idx_to_permuted_idx=moved,
        route_major=False,
    )
    return _set(arguments, path, lambda _: changed)


def _append_rows(case: Case, rank: int, arguments: Arguments) -> Arguments:
    """More padding after the last row (PACK-2)."""
    path, x = _unfinalized(arguments)
    rows = x.gemm2_permuted
    poison = torch.full((137, rows.shape[1]), float("nan"), dtype=rows.dtype, device=rows.device)
    changed = dataclasses.replace(x, gemm2_permuted=torch.cat([rows, poison]))
    return _set(arguments, path, lambda _: changed)


def _past_int32(case: Case, rank: int, arguments: Arguments) -> Arguments:
    """The rows that routes name lie past 2^31 elements (RUN-6).

    The buffer is not written but at its end, so that a machine with lazily mapped memory needs
    little of it.
    """
    path, x = _unfinalized(arguments)
    rows = x.gemm2_permuted
    offset = PAST_INT32 // rows.shape[1] + 1
    far = torch.empty((offset + rows.shape[0], rows.shape[1]), dtype=rows.dtype, device=rows.device)
    far[offset:] = rows
    index = x.expanded_idx_to_permuted_idx
    changed = dataclasses.replace(
        x,
        gemm2_permuted=far,
        expanded_idx_to_permuted_idx=torch.where(index >= 0, index + offset, index),
        route_major=False,
    )
    return _set(arguments, path, lambda _: changed)


def _other_dead_weights(case: Case, rank: int, arguments: Arguments) -> Arguments:
    """Other weights in the -1 slots, finite ones (ROUTE-1)."""
    path, x = _unfinalized(arguments)
    dead = x.expanded_idx_to_permuted_idx < 0
    weights = torch.where(dead, torch.full_like(x.expert_weights, 3.0), x.expert_weights)
    changed = dataclasses.replace(x, expert_weights=weights)
    return _set(arguments, path, lambda _: changed)


def _zero_weights(case: Case, rank: int, arguments: Arguments) -> Arguments:
    """Weight zero on live routes whose row holds NaN or infinity: a product is NaN (ROUTE-5)."""
    if "expert_outputs" in arguments:
        special = ~arguments["expert_outputs"].isfinite().all(dim=-1)[: case.tokens]
        weights = arguments["expert_weights"].clone()
        weights[: case.tokens][special] = 0.0
        return {**arguments, "expert_weights": weights}
    path, x = _unfinalized(arguments)
    rows, index = x.gemm2_permuted, x.expanded_idx_to_permuted_idx
    if rows.shape[0] == 0:
        return arguments
    special = ~rows.isfinite().all(dim=-1)[index.clamp(min=0).long()] & (index >= 0)
    weights = torch.where(special, torch.zeros_like(x.expert_weights), x.expert_weights)
    return _set(arguments, path, lambda _: dataclasses.replace(x, expert_weights=weights))


def _repeated_past_int32(case: Case, rank: int, arguments: Arguments) -> Arguments:
    """The case's tokens over and over, until rows and outputs pass 2^31 elements (RUN-6)."""
    times = -(-PAST_INT32 // (case.tokens * case.hidden)) + 1

    def repeat(tensor: Tensor) -> Tensor:
        return tensor.repeat(times, *[1] * (tensor.dim() - 1))

    if case.operation == FINALIZE:
        made = dict(arguments)
        for name in ("expert_outputs", "expert_weights"):
            made[name] = repeat(arguments[name][: case.tokens])
        return {**made, "output": repeat(arguments["output"])}
    made = {**arguments, "residual": repeat(arguments["residual"])}
    if case.operation == BOUNDARY:
        return {**made, "x": repeat(arguments["x"])}
    _, x = _unfinalized(arguments)
    rows = repeat(x.gemm2_permuted[: case.tokens * case.top_k])
    weights = repeat(x.expert_weights[: case.tokens])
    index = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
    return {
        **made,
        "x": UnfinalizedMoEOutput(rows, weights, index.view(weights.shape), x.route_major),
    }


def _cancelling_ranks(case: Case, rank: int, arguments: Arguments) -> Arguments:
    """Finalized parts of which the first and the last rank's cancel, and swallow what is added
    between (OWN-3): FP32 sums in another order differ."""
    x = arguments["x"]
    gen = torch.Generator().manual_seed(case.seed)
    large = torch.randn((case.tokens, case.hidden), generator=gen).to(x.routed) * 2.0**20
    if rank == 0:
        part = large
    elif rank == case.ranks - 1:
        part = -large
    else:
        part = x.routed * 2.0**-6
    return {**arguments, "x": dataclasses.replace(x, routed=part.contiguous())}


NEUTRAL: dict[str, Change] = {
    "cancelling-ranks": _cancelling_ranks,
    "repeated-past-int32": _repeated_past_int32,
    "zero-weights": _zero_weights,
    "other-dead-weights": _other_dead_weights,
    "permuted-rows": _permute_rows,
    "more-rows": _append_rows,
    "past-int32": _past_int32,
}


def apply(name: str, case: Case, rank: int, arguments: Arguments) -> Arguments:
    """The arguments of a case on a rank, changed by the variation of that name."""
    if name in NEUTRAL:
        return NEUTRAL[name](case, rank, arguments)
    for refusal in REFUSALS.get(case.operation, ()):
        if refusal.name == name:
            return refusal.change(case, rank, arguments)
    known = [*NEUTRAL, *(refusal.name for refusal in REFUSALS.get(case.operation, ()))]
    raise ValueError(f"variation: {name!r}; known for {case.operation}: {', '.join(known)}")
