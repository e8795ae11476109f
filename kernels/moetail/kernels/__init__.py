"""The contract's operations as CUDA kernels; on CPU tensors, the reference."""

from moetail.kernels.distributed import (
    beam_finalize_allreduce_norm_residual_norm,
    beam_moe_finalize_gather_norm_residual_norm,
)
from moetail.kernels.operations import (
    beam_moe_finalize,
    beam_moe_finalize_norm_residual_norm,
    beam_norm_residual_norm,
    convert_flashinfer_moe_output,
    finalize_moe_output,
    route_major_moe_output,
)
from moetail.kernels.workspace import BeamAllReduceWorkspace, ExchangeError

__all__ = [
    "BeamAllReduceWorkspace",
    "ExchangeError",
    "beam_finalize_allreduce_norm_residual_norm",
    "beam_moe_finalize",
    "beam_moe_finalize_gather_norm_residual_norm",
    "beam_moe_finalize_norm_residual_norm",
    "beam_norm_residual_norm",
    "convert_flashinfer_moe_output",
    "finalize_moe_output",
    "route_major_moe_output",
]
