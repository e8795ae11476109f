"""The contract's operations as CUDA kernels; on CPU tensors, the reference."""

from moetail.kernels.operations import (
    beam_moe_finalize,
    beam_moe_finalize_norm_residual_norm,
    beam_norm_residual_norm,
    convert_flashinfer_moe_output,
    finalize_moe_output,
    route_major_moe_output,
)

__all__ = [
    "beam_moe_finalize",
    "beam_moe_finalize_norm_residual_norm",
    "beam_norm_residual_norm",
    "convert_flashinfer_moe_output",
    "finalize_moe_output",
    "route_major_moe_output",
]
