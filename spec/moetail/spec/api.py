"""The API as a Protocol: eight operations, their shapes, dtypes and refusals.

An implementation is any object (a module, say) that provides a subset of these names with these
signatures. T tokens, K = top_k routes a token, H = hidden size, W ranks, L = ceil(T / W).
Refusals are :class:`moetail.spec.ContractError` in our implementations; of any other, the
conformance suite takes whatever Python exception is raised before anything has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from moetail.spec.types import MoEOutput, UnfinalizedMoEOutput

__all__ = ["MoETail", "Workspace", "WorkspaceFactory"]


class Workspace(Protocol):
    """What the ranks of a group share; made by :meth:`WorkspaceFactory.create` (operation 7).

    Attributes:
        world_size: W, the number of ranks.
        rank: this rank, 0 <= rank < W.
        hidden_size: the only H it serves.
        max_tokens: the most tokens T it serves; more are refused (DOMAIN-1).
        device_group: the process group of the W ranks.
        all_gather: a callable with the signature of torch.distributed's
            ``all_gather_into_tensor(output, input, group=...)``, which the "unfused" strategy uses
            in its place; None for torch.distributed's own.
        moe_gather_oneshot_max_tokens: the largest T for which no strategy means "oneshot" (OWN-4).
        moe_gather_separate_norm_min_tokens: the smallest T, above that, for which no strategy means
            "unfused"; None: never (OWN-4).
    """

    world_size: int
    rank: int
    hidden_size: int
    max_tokens: int
    device_group: Any
    all_gather: Callable[..., Any] | None
    moe_gather_oneshot_max_tokens: int
    moe_gather_separate_norm_min_tokens: int | None


class WorkspaceFactory(Protocol):
    """Operation 7, ``BeamAllReduceWorkspace``."""

    def create(
        self, group: Any, hidden_size: int, max_tokens: int, dtype: torch.dtype
    ) -> Workspace | None:
        """A workspace on every rank of ``group``, or None on every rank.

        A collective call: the ranks agree, so that no rank holds a workspace that another lacks.

        Args:
            group: a torch.distributed process group; every rank of it calls.
            hidden_size: H of every later call.
            max_tokens: the most tokens T of a later call.
            dtype: of the payload; BF16 is supported, any other dtype gives None.

        Returns:
            The workspace, or None where the group or the device is unsupported.

        Raises:
            ContractError: hidden_size < 1 or max_tokens < 0, or arguments that differ between the
                ranks; on every rank alike (DOMAIN-1).

        Rules: OWN-4, DOMAIN-1. Source: vLLM Beam moe_finalize.
        """


class MoETail(Protocol):
    """The operations of the MoE tail, in the contract's order."""

    def convert_flashinfer_moe_output(
        self,
        flashinfer_output: Any,
        *,
        do_finalize: bool,
        num_tokens: int,
        top_k: int,
        finalized_output: Tensor | None = None,
    ) -> Tensor | UnfinalizedMoEOutput:
        """Normalize what FlashInfer's TRTLLM MoE kernels return (operation 1).

        Args:
            flashinfer_output: finalized: a tensor, or a list of exactly one tensor. Deferred: the
                three tensors gemm2 ``[rows, H]``, weights (T * K elements, any shape and dtype)
                and map (T * K elements, int32, any shape), contiguous, on one device.
            do_finalize: whether the kernel finalized.
            num_tokens: T >= 0.
            top_k: K >= 1.
            finalized_output: the destination that was handed to the kernel, if one was; only with
                ``do_finalize``.

        Returns:
            Finalized: that very tensor. Deferred: an :class:`UnfinalizedMoEOutput` whose weights
            and map are views ``[T, K]`` of the given storage.

        Raises:
            ValueError: num_tokens < 0; top_k <= 0; a layout that is none of the above; a
                ``finalized_output`` that the returned tensor does not alias (shape, dtype, device
                and data pointer), or that is given without ``do_finalize`` (CONVERT-2, CONVERT-4).

        Rules: CONVERT-1, CONVERT-2, CONVERT-3, CONVERT-4, RUN-2. Source: vLLM moe_output.
        """

    def route_major_moe_output(
        self,
        routes: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        expert_map: Tensor | None,
    ) -> UnfinalizedMoEOutput:
        """Wrap one-row-per-route GEMM2 output (operation 2).

        Args:
            routes: ``[T * K, H]`` or ``[T, K, H]``, contiguous; row t * K + k is route (t, k).
            topk_weights: ``[T, K]`` routing weights of any dtype.
            topk_ids: ``[T, K]`` integer ids of the global experts.
            expert_map: ``[E]`` integer, the local index of each global expert and any negative
                number where it is not local; None where all are. An id that is itself negative
                names no expert, so with an expert map it is not local either.

        Returns:
            An :class:`UnfinalizedMoEOutput` with ``route_major=True``: the rows viewed as
            ``[T * K, H]``, the weights as they are, and the map int32 arange(T * K) as ``[T, K]``
            with -1 in the slots that are not local.

        Raises:
            ValueError: rows that are not contiguous (PACK-1); shapes or devices that do not agree,
                ids or a map that are no integers, ids past the map's end (CONVERT-2).

        Rules: PACK-1, PACK-3, CONVERT-1, CONVERT-2, CONVERT-3, RUN-2. Source: vLLM moe_output.
        """

    def beam_moe_finalize(
        self,
        expert_outputs: Tensor,
        expert_weights: Tensor,
        output: Tensor,
        routed_scale: float = 1.0,
        post_weight: Tensor | None = None,
        post_eps: float | None = None,
    ) -> Tensor:
        """Reduce the top-k rows of each live token, scale, and optionally norm (operation 3).

        Args:
            expert_outputs: BF16 ``[capacity, K, H]``; only the first ``live`` slots are read.
            expert_weights: FP32 ``[>= live, K]``.
            output: BF16 ``[live, H]``, the destination; its rows say how many slots are live. It
                must not share memory with an input.
            routed_scale: multiplies the rounded sum.
            post_weight: BF16 ``[H]``, the post-norm's affine; needs ``post_eps``.
            post_eps: the post-norm's eps, >= 0; None: no post-norm.

        Returns:
            ``output``, every element written.

        Raises:
            ContractError: outside 1 <= K <= 32, 256 <= H <= 8192, H % 256 == 0, live <= capacity,
                or tensors of another dtype, shape, device or layout (DOMAIN-1, PACK-1). Nothing
                has changed then (DOMAIN-2).

        Rules: PACK-1, ROUTE-5, ROUND-1 to ROUND-4, LIVE-1, LIVE-2, DOMAIN-1, DOMAIN-2, RUN-1 to
        RUN-4, RUN-6. Source: vLLM Beam moe_finalize.
        """

    def beam_norm_residual_norm(
        self,
        x: Tensor,
        residual: Tensor,
        post_weight: Tensor | None,
        post_eps: float | None,
        next_weight: Tensor | None,
        next_eps: float | None,
        scales: tuple[float, float] | None,
    ) -> tuple[Tensor, Tensor | None]:
        """The boundary between two layers (operation 4).

        Args:
            x: BF16 ``[T, H]``, any H >= 1.
            residual: BF16 ``[T, H]``.
            post_weight, post_eps: the optional norm of x, as in :meth:`beam_moe_finalize`.
            next_weight, next_eps: the optional norm of hidden. ``next_eps`` None: no norm,
                whether or not there is a weight; ``next_eps`` alone: norm without the affine.
            scales: (x_scale, r_scale) of the residual add; None adds as is.

        Returns:
            (hidden, normalized), BF16 ``[T, H]`` both; normalized is None exactly when
            ``next_eps`` is.

        Raises:
            ContractError: other shapes, dtypes, devices or layouts, a post_weight without
                post_eps, an eps that is negative or not finite (DOMAIN-1).

        Rules: ROUND-3 to ROUND-6, LIVE-2, DOMAIN-1, DOMAIN-2, RUN-1 to RUN-4, RUN-6. Source: vLLM
        Beam moe_finalize and the boundary kernel it calls.
        """

    def beam_moe_finalize_norm_residual_norm(
        self,
        x: UnfinalizedMoEOutput,
        residual: Tensor,
        post_weight: Tensor | None,
        post_eps: float | None,
        next_weight: Tensor | None,
        next_eps: float | None,
        scales: tuple[float, float] | None,
        routed_scale: float = 1.0,
        *,
        strategy: str | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Finalize and boundary on one rank (operation 5).

        Args:
            x: token-major rows with the identity map: BF16 rows ``[capacity * K, H]``, FP32
                weights ``[>= live, K]``, int32 map ``[>= live, K]``.
            residual: BF16 ``[live, H]``; its rows say how many slots are live.
            post_weight, post_eps, next_weight, next_eps, scales: as in
                :meth:`beam_norm_residual_norm`.
            routed_scale: as in :meth:`beam_moe_finalize`.
            strategy: None, "fused" (one pass) or "unfused" (finalize with the post-norm, then the
                boundary without one). They give the same bits wherever FP32 order does not matter.

        Returns:
            (hidden, normalized or None), as :meth:`beam_norm_residual_norm`.

        Raises:
            ContractError: as operations 3 and 4, an unknown strategy, or, where the implementation
                reads values, a map of the live slots that is not the identity (DOMAIN-1).

        Rules: PACK-1, ROUTE-5, ROUND-1 to ROUND-6, LIVE-1, LIVE-2, DOMAIN-1, DOMAIN-2, RUN-1 to
        RUN-4, RUN-6. Source: vLLM Beam moe_finalize.
        """

    def beam_moe_finalize_gather_norm_residual_norm(
        self,
        x: UnfinalizedMoEOutput,
        residual: Tensor,
        post_weight: Tensor | None,
        post_eps: float | None,
        next_weight: Tensor | None,
        next_eps: float | None,
        scales: tuple[float, float] | None,
        workspace: Workspace,
        routed_scale: float = 1.0,
        *,
        strategy: str | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Each rank finalizes the tokens it owns; every rank ends with all T (operation 6).

        Args:
            x: as in operation 5, for this rank's tokens [r * L, min((r + 1) * L, T)): slot i is
                token r * L + i. At least L slots; those past the owned ones contribute nothing.
            residual: BF16 ``[T, H]``, the same on every rank.
            post_weight, post_eps, next_weight, next_eps, scales, routed_scale: as in operation 5,
                the same on every rank.
            workspace: of W ranks, this H, and at least T tokens.
            strategy: "oneshot" (gather finalized rows, every rank runs the boundary for all
                tokens), "twoshot" (the owner runs the boundary, both outputs are gathered),
                "unfused" (finalize, all-gather, boundary, as separate steps), or None (by the
                workspace's thresholds, OWN-4).

        Returns:
            (hidden, normalized or None) of all T tokens, the same bits on every rank (OWN-3).

        Raises:
            ContractError: as operation 5; T > max_tokens or H != hidden_size; an unknown strategy,
                also when T = 0 (DOMAIN-1).

        Rules: PACK-1, ROUTE-5, ROUND-1 to ROUND-6, LIVE-1, LIVE-2, OWN-1 to OWN-4, DOMAIN-1,
        DOMAIN-2, RUN-1 to RUN-7. Source: vLLM Beam moe_finalize.
        """

    BeamAllReduceWorkspace: WorkspaceFactory

    def finalize_moe_output(self, x: MoEOutput) -> Tensor:
        """This rank's finalization of any MoE output (operation 8, derived).

        Args:
            x: routed either BF16 ``[T, H]`` (taken as the rounded reduction), or unfinalized with
                any permutation, -1 slots, and BF16, FP16 or FP32 weights. The routed scaling
                factor multiplies the rounded sum; then the shared output, BF16 ``[T, H]``, is
                added. Any H >= 1 and K >= 1.

        Returns:
            BF16 ``[T, H]``, not reduced over ranks; a tensor of its own, or ``x.routed`` itself
            where nothing is to be done.

        Raises:
            ContractError: other shapes, dtypes, devices or layouts (DOMAIN-1, PACK-1, PACK-3) or,
                where the implementation reads values, a map that names rows that do not exist.

        Rules: PACK-1 to PACK-3, ROUTE-1 to ROUTE-5, ROUND-1 to ROUND-3, ROUND-7, LIVE-2, DOMAIN-1,
        DOMAIN-2, RUN-1 to RUN-4, RUN-6. Source: vLLM's released consumers and its peers' fixes.
        """

    def beam_finalize_allreduce_norm_residual_norm(
        self,
        x: MoEOutput,
        residual: Tensor,
        post_weight: Tensor | None,
        post_eps: float | None,
        next_weight: Tensor | None,
        next_eps: float | None,
        scales: tuple[float, float] | None,
        workspace: Workspace,
    ) -> tuple[Tensor, Tensor | None]:
        """finalize_moe_output on each rank, all-reduce, boundary (operation 8, derived).

        Args:
            x: this rank's part, as in :meth:`finalize_moe_output`; the same T on every rank.
            residual: BF16 ``[T, H]``, the same on every rank.
            post_weight, post_eps, next_weight, next_eps, scales: as in
                :meth:`beam_norm_residual_norm`, the same on every rank.
            workspace: of W ranks, this H, and at least T tokens.

        Returns:
            (hidden, normalized or None), the same bits on every rank (OWN-3).

        Raises:
            ContractError: as :meth:`finalize_moe_output` and :meth:`beam_norm_residual_norm`;
                T > max_tokens or H != hidden_size (DOMAIN-1).

        Rules: PACK-1 to PACK-3, ROUTE-1 to ROUTE-5, ROUND-1 to ROUND-7, LIVE-2, OWN-3, DOMAIN-1,
        DOMAIN-2, RUN-1 to RUN-7. Source: vLLM's released consumers and its peers' fixes.
        """
