"""The contract in pure torch: any device, any number of ranks, torch alone.

The module's functions are the operations of :class:`moetail.spec.MoETail`; ``Reference`` is the
class behind them, whose every stage can be overridden.
"""

from moetail.reference.operations import Reference
from moetail.reference.stages import Stages
from moetail.reference.workspace import BeamAllReduceWorkspace

__all__ = [
    "BeamAllReduceWorkspace",
    "Reference",
    "Stages",
    "beam_finalize_allreduce_norm_residual_norm",
    "beam_moe_finalize",
    "beam_moe_finalize_gather_norm_residual_norm",
    "beam_moe_finalize_norm_residual_norm",
    "beam_norm_residual_norm",
    "convert_flashinfer_moe_output",
    "finalize_moe_output",
    "route_major_moe_output",
]

_reference = Reference()

convert_flashinfer_moe_output = _reference.convert_flashinfer_moe_output
route_major_moe_output = _reference.route_major_moe_output
beam_moe_finalize = _reference.beam_moe_finalize
beam_norm_residual_norm = _reference.beam_norm_residual_norm
beam_moe_finalize_norm_residual_norm = _reference.beam_moe_finalize_norm_residual_norm
beam_moe_finalize_gather_norm_residual_norm = _reference.beam_moe_finalize_gather_norm_residual_norm
finalize_moe_output = _reference.finalize_moe_output
beam_finalize_allreduce_norm_residual_norm = _reference.beam_finalize_allreduce_norm_residual_norm
