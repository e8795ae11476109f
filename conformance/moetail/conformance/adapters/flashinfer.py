"""FlashInfer's trace reference of its fused all-reduce, and its kernel where that is compiled.

FlashInfer describes its kernels by traces, some with a reference in torch. That of
``allreduce_fusion`` takes the reduced tensor, adds the residual and norms (its pattern 1): the
boundary between two layers without a post-norm and without scales. The function is taken out of its
file by name and run by itself, so nothing else of FlashInfer is loaded, and a machine without a GPU
will do. The file is that of the installed ``flashinfer-python``, or else of what the environment's
``MOETAIL_FLASHINFER`` names: a wheel, or a folder in which one was unpacked.

Operation 4 maps (``beam_norm_residual_norm``): the post-norm and the products with the scales come
from :mod:`moetail.reference`, the residual add, its rounding and the next norm from FlashInfer.

Operation 8 (``beam_finalize_allreduce_norm_residual_norm``) maps to the kernel
``trtllm_moe_finalize_allreduce_fusion``, which has no trace reference. It is provided on a machine
with a GPU and the kernel's library; :mod:`.flashinfer_kernel` says how it is built and what of the
operation it computes.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moetail.conformance.adapters.flashinfer_kernel import LIBRARY, find_library, mapped, scaled
from moetail.conformance.adapters.sources import Source, find_source, release_beside
from moetail.conformance.implementation import UsageError
from moetail.reference import Reference
from moetail.spec import checks
from moetail.spec.operations import (
    ALLREDUCE,
    BOUNDARY,
    CONVERT,
    FINALIZE,
    FUSED,
    GATHER,
    MOE_OUTPUT,
    ROUTE_MAJOR,
    WORKSPACE,
)

__all__ = [
    "NOT_MAPPED",
    "VERSIONS",
    "beam_finalize_allreduce_norm_residual_norm",
    "beam_norm_residual_norm",
]

_NAME = "_allreduce_fusion_reference"
_PATTERN = 1  # all-reduce, residual, RMSNorm

NOT_MAPPED: dict[str, str] = {
    CONVERT.name: "it makes these layouts, and has no function that reads them",
    ROUTE_MAJOR.name: "it makes these layouts, and has no function that reads them",
    FINALIZE.name: "its finalize is fused into a MoE kernel or into an all-reduce",
    FUSED.name: "its finalize is fused into a MoE kernel or into an all-reduce",
    GATHER.name: "it has no finalize of owned tokens",
    WORKSPACE.name: "its workspace holds other things, for its own kernels",
    MOE_OUTPUT.name: "its finalize is fused into a MoE kernel or into an all-reduce",
}


def _function(source: Source) -> Callable[..., Any]:
    """The one function of the file, without the rest of it."""
    parts = ast.parse(source.text, source.name).body
    found = [part for part in parts if isinstance(part, ast.FunctionDef) and part.name == _NAME]
    if not found:
        raise UsageError(
            f"flashinfer-python {source.release} has no {_NAME}; allowed: 0.7.4, which has it"
        )
    names: dict[str, Any] = {"torch": torch, "Any": Any}
    exec(compile(ast.Module([*found], []), source.name, "exec", dont_inherit=True), names)
    function: Callable[..., Any] = names[_NAME]
    return function


_SOURCE = find_source(
    "flashinfer-python",
    "flashinfer/trace/templates/comm.py",
    variable="MOETAIL_FLASHINFER",
    known="0.7.4",
)
VERSIONS: dict[str, str] = {"flashinfer-python": _SOURCE.release}
_FUSION = _function(_SOURCE)
_reference = Reference()


def beam_norm_residual_norm(
    x: Tensor,
    residual: Tensor,
    post_weight: Tensor | None,
    post_eps: float | None,
    next_weight: Tensor | None,
    next_eps: float | None,
    scales: tuple[float, float] | None,
) -> tuple[Tensor, Tensor | None]:
    """See :meth:`moetail.spec.MoETail.beam_norm_residual_norm`."""
    checks.check(BOUNDARY, locals())  # theirs refuses nothing
    norm = {"rows": x, "post_weight": post_weight, "post_eps": post_eps}
    value = _reference.through(("post-norm",), norm)
    if scales is not None:
        value, residual = scaled(value, scales[0]), scaled(residual, scales[1])
    gain = value.new_ones(value.shape[1]) if next_weight is None else next_weight
    hidden, normalized = torch.empty_like(value), torch.empty_like(value)
    _FUSION(
        value,
        None,
        _PATTERN,
        residual_in=residual,
        rms_gamma=gain,
        rms_eps=1.0 if next_eps is None else next_eps,
        residual_out=hidden,
        norm_out=normalized,
    )
    return hidden, None if next_eps is None else normalized


beam_finalize_allreduce_norm_residual_norm: Callable[..., tuple[Tensor, Tensor | None]] | None
"""See :meth:`moetail.spec.MoETail.beam_finalize_allreduce_norm_residual_norm`, or None."""


def _finalize_allreduce() -> Callable[..., tuple[Tensor, Tensor | None]] | None:
    """The operation, or None with the reason in NOT_MAPPED."""
    library = find_library()
    if library is not None and torch.cuda.is_available():
        VERSIONS["trtllm_moe_finalize_allreduce_fusion"] = release_beside(library, "flashinfer")
        return mapped(library)
    lacking = f"there is no {LIBRARY}" if library is None else "there is no GPU"
    NOT_MAPPED[ALLREDUCE.name] = (
        "trtllm_moe_finalize_allreduce_fusion has no trace reference, and its kernel runs on GPUs "
        f"from a library that kernels/benchmarks/peers.py builds: {lacking}. Or capture its calls, "
        "and judge the dumps"
    )
    return None


beam_finalize_allreduce_norm_residual_norm = _finalize_allreduce()
