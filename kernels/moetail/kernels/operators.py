"""The torch operators ``moetail::*``: on CUDA the kernels, on CPU the reference, on Meta shapes.

They are opaque to torch.compile and take what :mod:`.operations` has checked. Operators of one
boundary return (hidden, normalized); without a next norm, normalized is an empty tensor of shape
``[0]``, since an operator's results have no None.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moetail.reference import Reference
from moetail.spec import MoEOutput, UnfinalizedMoEOutput

__all__ = ["boundary", "finalize", "finalize_boundary", "finalize_into"]

_reference = Reference()
_torch_library: Any = torch.library  # its classes have no types
_library = _torch_library.Library("moetail", "DEF")
# Programmatic dependent launch: a kernel's launch overlaps the end of the one before.
_PDL = True

_NORMS = "Tensor? post_weight, float? post_eps, Tensor? next_weight, float? next_eps"
_SCALES = "float x_scale, float r_scale"
for schema in (
    # rows [R, H], weights [T, K] or None (K = 1, weight 1), map [T, K] or None (row t * K + k)
    "finalize(Tensor rows, Tensor? weights, Tensor? map, Tensor? shared, float routed_scale)"
    " -> Tensor",
    # rows [capacity, K, H]
    "finalize_into(Tensor rows, Tensor weights, Tensor(a!) output, float routed_scale,"
    " Tensor? post_weight, float? post_eps) -> ()",
    f"boundary(Tensor x, Tensor residual, {_NORMS}, {_SCALES}) -> (Tensor, Tensor)",
    # rows [capacity * K, H]; the map, which is the identity, is read on CPU alone, to check that
    f"finalize_boundary(Tensor rows, Tensor weights, Tensor map, Tensor residual, {_NORMS},"
    f" {_SCALES}, float routed_scale) -> (Tensor, Tensor)",
):
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))

finalize = torch.ops.moetail.finalize.default
finalize_into = torch.ops.moetail.finalize_into.default
boundary = torch.ops.moetail.boundary.default
finalize_boundary = torch.ops.moetail.finalize_boundary.default


loaded: dict[int, Any] = {}  # the library of each GPU that has been asked for, by its index


def kernels_on(device: torch.device) -> Any:
    """The library of the kernels for that GPU, built where it is not there yet."""
    kernels = loaded.get(device.index)
    if kernels is None:
        from moetail.kernels import build  # not above: it is a command too, and would load twice

        kernels = build.library(torch.cuda.get_device_capability(device))
        loaded[device.index] = kernels
    return kernels


def _normalized_like(hidden: Tensor, next_eps: float | None) -> Tensor:
    return hidden.new_empty(0) if next_eps is None else torch.empty_like(hidden)


# --- CUDA -----------------------------------------------------------------------------------------


def _finalize_cuda(
    rows: Tensor,
    weights: Tensor | None,
    map: Tensor | None,
    shared: Tensor | None,
    routed_scale: float,
) -> Tensor:
    output = _finalize_meta(rows, weights, map, shared, routed_scale)
    if output.numel():
        kernels_on(rows.device).finalize(rows, weights, map, shared, output, routed_scale, _PDL)
    return output


def _finalize_into_cuda(
    rows: Tensor,
    weights: Tensor,
    output: Tensor,
    routed_scale: float,
    post_weight: Tensor | None,
    post_eps: float | None,
) -> None:
    if not output.numel():
        return
    rows = rows.flatten(0, 1)
    if post_eps is None:
        kernels_on(rows.device).finalize(rows, weights, None, None, output, routed_scale, _PDL)
    else:
        nothing: tuple[Any, ...] = (None, 1.0, 1.0, None, 0.0)  # no residual, no next norm
        kernels_on(rows.device).tail(
            rows, weights, routed_scale, post_weight, post_eps, *nothing, output, None, _PDL
        )


def _tail(
    x: Tensor,
    weights: Tensor | None,
    routed_scale: float,
    residual: Tensor,
    post_weight: Tensor | None,
    post_eps: float | None,
    next_weight: Tensor | None,
    next_eps: float | None,
    x_scale: float,
    r_scale: float,
) -> tuple[Tensor, Tensor]:
    hidden = torch.empty_like(residual)
    normalized = _normalized_like(hidden, next_eps)
    if hidden.numel():
        kernels_on(x.device).tail(
            x,
            weights,
            routed_scale,
            post_weight,
            post_eps,
            residual,
            x_scale,
            r_scale,
            next_weight,
            0.0 if next_eps is None else next_eps,
            hidden,
            None if next_eps is None else normalized,
            _PDL,
        )
    return hidden, normalized


def _boundary_cuda(x: Tensor, residual: Tensor, *norms_and_scales: Any) -> tuple[Tensor, Tensor]:
    return _tail(x, None, 1.0, residual, *norms_and_scales)


def _finalize_boundary_cuda(
    rows: Tensor, weights: Tensor, map: Tensor, residual: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    *norms_and_scales, routed_scale = rest
    return _tail(rows, weights, routed_scale, residual, *norms_and_scales)


# --- CPU ------------------------------------------------------------------------------------------


def _finalize_cpu(
    rows: Tensor,
    weights: Tensor | None,
    map: Tensor | None,
    shared: Tensor | None,
    routed_scale: float,
) -> Tensor:
    if weights is None or map is None:
        return _reference.finalize_moe_output(MoEOutput(rows, shared, routed_scale))
    routed = UnfinalizedMoEOutput(rows, weights, map)
    return _reference.finalize_moe_output(MoEOutput(routed, shared, routed_scale))


def _finalize_into_cpu(rows: Tensor, weights: Tensor, output: Tensor, *rest: Any) -> None:
    _reference.beam_moe_finalize(rows, weights, output, *rest)


def _with_both(result: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor]:
    hidden, normalized = result
    return hidden, hidden.new_empty(0) if normalized is None else normalized


def _boundary_cpu(x: Tensor, residual: Tensor, *norms_and_scales: Any) -> tuple[Tensor, Tensor]:
    post_weight, post_eps, next_weight, next_eps, *scales = norms_and_scales
    return _with_both(
        _reference.beam_norm_residual_norm(
            x, residual, post_weight, post_eps, next_weight, next_eps, (scales[0], scales[1])
        )
    )


def _finalize_boundary_cpu(
    rows: Tensor, weights: Tensor, map: Tensor, residual: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    post_weight, post_eps, next_weight, next_eps, x_scale, r_scale, routed_scale = rest
    return _with_both(
        _reference.beam_moe_finalize_norm_residual_norm(
            UnfinalizedMoEOutput(rows, weights, map),
            residual,
            post_weight,
            post_eps,
            next_weight,
            next_eps,
            (x_scale, r_scale),
            routed_scale,
        )
    )


# --- Meta -----------------------------------------------------------------------------------------


def _finalize_meta(
    rows: Tensor,
    weights: Tensor | None,
    map: Tensor | None,
    shared: Tensor | None,
    routed_scale: float,
) -> Tensor:
    tokens = rows.shape[0] if weights is None else weights.shape[0]
    return rows.new_empty((tokens, rows.shape[1]))


def _finalize_into_meta(rows: Tensor, weights: Tensor, output: Tensor, *rest: Any) -> None:
    return None


def _boundary_meta(x: Tensor, residual: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    next_eps = rest[3]
    return torch.empty_like(residual), _normalized_like(residual, next_eps)


def _finalize_boundary_meta(
    rows: Tensor, weights: Tensor, map: Tensor, residual: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    return _boundary_meta(rows, residual, *rest)


for name, implementations in {
    "finalize": (_finalize_cuda, _finalize_cpu, _finalize_meta),
    "finalize_into": (_finalize_into_cuda, _finalize_into_cpu, _finalize_into_meta),
    "boundary": (_boundary_cuda, _boundary_cpu, _boundary_meta),
    "finalize_boundary": (
        _finalize_boundary_cuda,
        _finalize_boundary_cpu,
        _finalize_boundary_meta,
    ),
}.items():
    for key, implementation in zip(("CUDA", "CPU", "Meta"), implementations, strict=True):
        _library.impl(name, implementation, key)
