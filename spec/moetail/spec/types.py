"""What a MoE layer hands to whoever fuses its tail.

Field names, their order and their defaults are those of vLLM's ``moe_output``, so that a producer
or a consumer written for it needs no change. The classes only carry tensors: checks belong to the
operations that consume them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["MoEOutput", "UnfinalizedMoEOutput"]


@dataclass
class UnfinalizedMoEOutput:
    """What a MoE kernel leaves when it stops after its second GEMM.

    Attributes:
        gemm2_permuted: ``[rows, H]`` permuted, unweighted expert results, densely packed (PACK-1).
            ``rows`` is a padded figure that means nothing, and a row that no route maps to may hold
            anything, NaN included (PACK-2).
        expert_weights: ``[T, K]`` routing weights. A consumer reads the dtype the tensor has
            (ROUTE-3): the activation dtype when the kernel routed by itself, FP32 when the router
            did. They carry the routed scaling factor where the routing method folds it in.
        expanded_idx_to_permuted_idx: ``[T, K]`` int32, the row of route (t, k); -1 where that
            expert is not local to this rank (ROUTE-1).
        route_major: row ``t * K + k`` holds route (t, k): the map is the identity apart from its -1
            slots, and there are T * K rows on every rank (PACK-3).
    """

    gemm2_permuted: Tensor
    expert_weights: Tensor
    expanded_idx_to_permuted_idx: Tensor
    route_major: bool = False


@dataclass
class MoEOutput:
    """A MoE layer's output with its last reduction, the one over ranks, still open.

    Attributes:
        routed: ``[T, H]`` finalized, or an :class:`UnfinalizedMoEOutput`. A producer leaves it
            unfinalized only when a fused consumer can take it.
        shared_output: ``[T, H]``, the shared experts' part, also unreduced; whoever finalizes adds
            it. None where there are no shared experts.
        routed_scaling_factor: multiplies the routed sum before the shared add (ROUND-2, ROUND-7);
            1.0 where the weights already carry it.
    """

    routed: Tensor | UnfinalizedMoEOutput
    shared_output: Tensor | None = None
    routed_scaling_factor: float = 1.0
