"""`beam_norm_residual_norm` in CUDA, compiled and loaded through tvm-ffi."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import tvm_ffi
import tvm_ffi.cpp
from torch import Tensor

from moetail.spec import checks


def build(directory: str | None = None) -> str:
    """Compiles the source beside this file; returns the library's path.

    The GPU at hand decides the architecture, or the variable TVM_FFI_CUDA_ARCH_LIST ("9.0").
    """
    source = Path(__file__).with_suffix(".cu")
    return str(tvm_ffi.cpp.build("boundary", cuda_files=[str(source)], build_directory=directory))


@functools.cache
def library() -> Any:
    return tvm_ffi.load_module(build())


def beam_norm_residual_norm(
    x: Tensor,
    residual: Tensor,
    post_weight: Tensor | None,
    post_eps: float | None,
    next_weight: Tensor | None,
    next_eps: float | None,
    scales: tuple[float, float] | None,
) -> tuple[Tensor, Tensor | None]:
    checks.check("beam_norm_residual_norm", locals())
    hidden = torch.empty_like(x)
    normalized = None if next_eps is None else torch.empty_like(x)
    if x.shape[0] == 0:
        return hidden, normalized  # nothing is launched (LIVE-2)
    x_scale, r_scale = (None, None) if scales is None else map(float, scales)
    library().boundary(
        x,
        residual,
        post_weight,
        None if post_eps is None else float(post_eps),
        next_weight,
        0.0 if next_eps is None else float(next_eps),
        x_scale,
        r_scale,
        hidden,
        normalized,
    )
    return hidden, normalized
