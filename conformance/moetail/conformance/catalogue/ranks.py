"""Mutants of liveness, ownership, and what passes between ranks: LIVE, OWN, RUN-5, RUN-7."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moetail.conformance.catalogue.around import Around
from moetail.conformance.catalogue.mutant import breaks
from moetail.conformance.catalogue.norms import PostNormNotRounded
from moetail.reference import Reference
from moetail.spec import MoEOutput, UnfinalizedMoEOutput, Workspace, tokens_per_rank
from moetail.spec.rules import ALLREDUCE, FINALIZE, FUSED, GATHER

# --- LIVE-1 ---------------------------------------------------------------------------------------


class DeadSlots(Reference):
    """Does something with the slots past the live ones; a gather's are OWN-2's matter."""

    def finalize_owned(
        self, x: UnfinalizedMoEOutput, slots: int, live: int, routed_scale: float
    ) -> Tensor:
        top_k = x.expert_weights.shape[1]
        trimmed = replace(x, gemm2_permuted=x.gemm2_permuted[: live * top_k])
        return super().finalize_owned(trimmed, slots, live, routed_scale)


@breaks("LIVE-1", source="vllm #39593", operations=(FINALIZE, FUSED))
class DeadSlotsTimesZero(DeadSlots):
    """Sums over the whole capacity with dead slots masked by zero: a NaN there reaches all."""

    def finalize_slots(
        self, slots: Tensor, weights: Tensor, live: int, routed_scale: float
    ) -> Tensor:
        finalized = super().finalize_slots(slots, weights, live, routed_scale)
        dead = slots[live:].to(torch.float32)
        if not dead.numel():
            return finalized
        return self.round(finalized.to(torch.float32) + (dead * 0.0).sum(dim=(0, 1)))


@breaks("LIVE-1", operations=(FINALIZE, FUSED))
class LiveSlotsFromTheEnd(DeadSlots):
    """Takes the last slots of the capacity for the live ones."""

    def finalize_slots(
        self, slots: Tensor, weights: Tensor, live: int, routed_scale: float
    ) -> Tensor:
        return super().finalize_slots(
            slots[slots.shape[0] - live :], weights[:live], live, routed_scale
        )


@breaks("LIVE-1", operations=(FINALIZE, FUSED))
class LastSlotReadAhead(DeadSlots):
    """Adds the slot after the last live one to that one, times zero: a prefetch gone wrong."""

    def finalize_slots(
        self, slots: Tensor, weights: Tensor, live: int, routed_scale: float
    ) -> Tensor:
        finalized = super().finalize_slots(slots, weights, live, routed_scale)
        if 0 < live < slots.shape[0]:
            ahead = slots[live, 0].to(torch.float32) * 0.0
            finalized[-1] = self.round(finalized[-1].to(torch.float32) + ahead)
        return finalized


# --- OWN-1 ----------------------------------------------------------------------------------------


class Placing(Reference):
    """Places every rank's gathered rows where ``owned`` says; what nobody owns stays zero."""

    def placed(self, num_tokens: int, world_size: int, rank: int) -> list[int]:
        slots = tokens_per_rank(num_tokens, world_size)
        return list(self.owned(num_tokens, world_size, rank))[:slots]

    def finalize_owned(
        self, x: UnfinalizedMoEOutput, slots: int, live: int, routed_scale: float
    ) -> Tensor:
        return super().finalize_owned(x, slots, min(live, slots), routed_scale)

    def gather(
        self, workspace: Workspace, rows: Tensor, num_tokens: int, *, through_hook: bool = False
    ) -> Tensor:
        ranks, slots = workspace.world_size, rows.shape[0]
        gathered = super().gather(workspace, rows, ranks * slots, through_hook=through_hook)
        if tokens_per_rank(num_tokens, ranks) != slots or num_tokens == 0:
            return gathered[:num_tokens]
        placed = torch.zeros_like(gathered[:num_tokens])
        for rank in range(ranks):
            own = self.placed(num_tokens, ranks, rank)
            placed[own] = gathered[rank * slots : rank * slots + len(own)]
        return placed

    def all_reduce(self, partial: Tensor, workspace: Workspace) -> Tensor:
        return Reference().all_reduce(partial, workspace)

    def twoshot(
        self,
        finalized: Tensor,
        residual: Tensor,
        owned: range,
        tail: tuple[Any, ...],
        workspace: Workspace,
    ) -> tuple[Tensor, Tensor | None]:
        num_tokens = residual.shape[0]
        own = self.placed(num_tokens, workspace.world_size, workspace.rank)
        own_residual = torch.zeros_like(finalized)
        own_residual[: len(own)] = residual[own]
        hidden, normalized = self.boundary(finalized, own_residual, *tail)
        hidden = self.gather(workspace, hidden, num_tokens)
        if normalized is not None:
            normalized = self.gather(workspace, normalized, num_tokens)
        return hidden, normalized


@breaks("OWN-1", source="VeOmni #61")
class OwnershipFloor(Placing):
    """Divides rounding down: the last tokens belong to nobody."""

    def owned(self, num_tokens: int, world_size: int, rank: int) -> range:
        block = num_tokens // world_size
        return range(rank * block, (rank + 1) * block)


@breaks("OWN-1")
class OwnershipRoundRobin(Placing):
    """Deals the tokens to the ranks in turn."""

    def owned(self, num_tokens: int, world_size: int, rank: int) -> range:
        return range(rank, num_tokens, world_size)


@breaks("OWN-1")
class OwnershipOffByOne(Placing):
    """Starts every block one token late, and the first token belongs to nobody."""

    def owned(self, num_tokens: int, world_size: int, rank: int) -> range:
        block = tokens_per_rank(num_tokens, world_size)
        return range(min(rank * block + 1, num_tokens), min((rank + 1) * block + 1, num_tokens))


@breaks("OWN-1")
class OwnershipBalanced(Placing):
    """Gives the first T mod W ranks one token more than the others, instead of ceil(T / W)."""

    def owned(self, num_tokens: int, world_size: int, rank: int) -> range:
        block, more = divmod(num_tokens, world_size)
        start = rank * block + min(rank, more)
        return range(start, start + block + (rank < more))


@breaks("OWN-1")
class LastBlockDropped(Placing):
    """Takes a rank's block that is not full for padding."""

    def owned(self, num_tokens: int, world_size: int, rank: int) -> range:
        own = super().owned(num_tokens, world_size, rank)
        full = len(own) == tokens_per_rank(num_tokens, world_size)
        return own if full else range(num_tokens, num_tokens)


# --- OWN-2 ----------------------------------------------------------------------------------------


@breaks("OWN-2", also=("LIVE-1",))
class CapacityGathered(Reference):
    """Every rank contributes all its slots, capacity included, which moves the later tokens."""

    def finalize_owned(
        self, x: UnfinalizedMoEOutput, slots: int, live: int, routed_scale: float
    ) -> Tensor:
        top_k = x.expert_weights.shape[1]
        every = min(x.gemm2_permuted.shape[0] // top_k, x.expert_weights.shape[0])
        return super().finalize_owned(x, every, every, routed_scale)


@breaks("OWN-2")
class PaddingRowsMasked(Reference):
    """Finalizes padding too, and masks the gathered rows past T by zero: a NaN there spreads."""

    def finalize_owned(
        self, x: UnfinalizedMoEOutput, slots: int, live: int, routed_scale: float
    ) -> Tensor:
        return super().finalize_owned(x, slots, slots, routed_scale)

    def gather(
        self, workspace: Workspace, rows: Tensor, num_tokens: int, *, through_hook: bool = False
    ) -> Tensor:
        every = workspace.world_size * rows.shape[0]
        gathered = super().gather(workspace, rows, every, through_hook=through_hook)
        masked = (gathered[num_tokens:].to(torch.float32) * 0.0).sum(dim=0)
        return self.round(gathered[:num_tokens].to(torch.float32) + masked)


@breaks("OWN-2")
class PaddingTimesZero(Reference):
    """Masks the padding of the last ranks by zero: a NaN there reaches the owned tokens."""

    def finalize_owned(
        self, x: UnfinalizedMoEOutput, slots: int, live: int, routed_scale: float
    ) -> Tensor:
        finalized = super().finalize_owned(x, slots, live, routed_scale)
        padding = self.as_slots(x)[live:slots].to(torch.float32)
        if live and padding.numel():
            own = finalized[:live].to(torch.float32) + (padding * 0.0).sum(dim=(0, 1))
            finalized[:live] = self.round(own)
        return finalized


# --- OWN-3: each rank admissible, and the ranks different -----------------------------------------


@breaks("OWN-3", operations=(ALLREDUCE,))
class SumsFromOwnRank(Reference):
    """Every rank starts the sum over ranks with its own part."""

    def all_reduce(self, partial: Tensor, workspace: Workspace) -> Tensor:
        self.first = workspace.rank
        return super().all_reduce(partial, workspace)

    first = 0

    def sum_ranks(self, parts: Tensor) -> Tensor:
        return super().sum_ranks(parts.roll(-self.first, 0))


@breaks("OWN-3", operations=(GATHER,))
class OwnRowsInAnotherOrder(Reference):
    """Finalizes the rows it sends in one order, and the rows it keeps in the reverse order."""

    kept = torch.empty(0)
    reverse = False

    def reduce(self, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        if self.reverse:
            weights, index = weights.flip(1), index.flip(1)
        return super().reduce(rows, weights, index)

    def finalize_owned(
        self, x: UnfinalizedMoEOutput, slots: int, live: int, routed_scale: float
    ) -> Tensor:
        self.reverse = True
        try:
            self.kept = super().finalize_owned(x, slots, live, routed_scale)[:live]
        finally:
            self.reverse = False
        return super().finalize_owned(x, slots, live, routed_scale)

    def gather(
        self, workspace: Workspace, rows: Tensor, num_tokens: int, *, through_hook: bool = False
    ) -> Tensor:
        gathered = super().gather(workspace, rows, num_tokens, through_hook=through_hook)
        start = workspace.rank * rows.shape[0]
        if self.kept.numel() and rows.shape[0] == tokens_per_rank(num_tokens, workspace.world_size):
            gathered[start : start + self.kept.shape[0]] = self.kept
        return gathered

    def twoshot(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        self.kept = torch.empty(0)
        return super().twoshot(*args, **kwargs)

    def all_reduce(self, partial: Tensor, workspace: Workspace) -> Tensor:
        return Reference().all_reduce(partial, workspace)


@breaks("OWN-3")
class InverseDependsOnRank(Around):
    """The inverse RMS errs by its permitted 2^-16, up on even ranks and down on odd ones."""

    error = 0.0

    def around(self, operation: str, call: dict[str, Any], compute: Any) -> Any:
        if "workspace" not in call or not hasattr(call["workspace"], "rank"):
            return compute(call)
        self.error = 0.98 * 2.0**-16 * (-1.0 if call["workspace"].rank % 2 else 1.0)
        if operation == GATHER and call["strategy"] is None:
            call["strategy"] = "oneshot"  # in which every rank runs the boundary
        try:
            return compute(call)
        finally:
            self.error = 0.0

    def inverse_rms(self, value: Tensor, eps: float) -> Tensor:
        return super().inverse_rms(value, eps) * (1.0 + self.error)


# --- OWN-4: strategies ----------------------------------------------------------------------------


@breaks("OWN-4", operations=(GATHER,), also=("ROUND-4",))
class TwoshotNormNotRounded(PostNormNotRounded):
    """The "twoshot" path keeps the post-norm in FP32 into the residual add; the others round."""

    in_twoshot = False

    def boundary(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        if self.in_twoshot:
            return super().boundary(*args, **kwargs)
        return super(PostNormNotRounded, self).boundary(*args, **kwargs)

    def twoshot(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        self.in_twoshot = True
        try:
            return super().twoshot(*args, **kwargs)
        finally:
            self.in_twoshot = False


@breaks("OWN-4", operations=(GATHER,), also=("ROUND-2",))
class UnfusedGatherForgetsScale(Around):
    """The "unfused" path does not pass the routed scale on."""

    def around(self, operation: str, call: dict[str, Any], compute: Any) -> Any:
        if operation == GATHER and call["strategy"] == "unfused":
            call["routed_scale"] = 1.0
        return compute(call)


@breaks("OWN-4", operations=(GATHER,))
class UnfusedIgnoresHook(Reference):
    """The "unfused" path never calls the workspace's all_gather."""

    def gather(
        self, workspace: Workspace, rows: Tensor, num_tokens: int, *, through_hook: bool = False
    ) -> Tensor:
        return super().gather(workspace, rows, num_tokens)


@breaks("OWN-4", operations=(GATHER,))
class OneshotCallsHook(Reference):
    """Every strategy goes through the workspace's all_gather."""

    def gather(
        self, workspace: Workspace, rows: Tensor, num_tokens: int, *, through_hook: bool = False
    ) -> Tensor:
        return super().gather(workspace, rows, num_tokens, through_hook=True)

    def all_reduce(self, partial: Tensor, workspace: Workspace) -> Tensor:
        return Reference().all_reduce(partial, workspace)


@breaks("OWN-4", operations=(GATHER,))
class DefaultIsNeverUnfused(Reference):
    """Ignores moe_gather_separate_norm_min_tokens."""

    def choose_strategy(self, num_tokens: int, workspace: Workspace) -> str:
        chosen = super().choose_strategy(num_tokens, workspace)
        return "twoshot" if chosen == "unfused" else chosen


@breaks("OWN-4", operations=(GATHER,))
class DefaultIsAlwaysUnfused(Reference):
    """Takes strategy None for "unfused"."""

    def choose_strategy(self, num_tokens: int, workspace: Workspace) -> str:
        return "unfused"


@breaks("OWN-4", operations=(GATHER,))
class UnfusedThresholdExclusive(Reference):
    """Chooses "unfused" above its threshold, not from it on."""

    def choose_strategy(self, num_tokens: int, workspace: Workspace) -> str:
        chosen = super().choose_strategy(num_tokens, workspace)
        exact = num_tokens == workspace.moe_gather_separate_norm_min_tokens
        return "twoshot" if chosen == "unfused" and exact else chosen


@breaks("OWN-4", operations=(GATHER,))
class UnfusedThresholdFirst(Reference):
    """Asks for the "unfused" threshold before the "oneshot" one."""

    def choose_strategy(self, num_tokens: int, workspace: Workspace) -> str:
        separate = workspace.moe_gather_separate_norm_min_tokens
        if separate is not None and num_tokens >= separate:
            return "unfused"
        return super().choose_strategy(num_tokens, workspace)


# --- RUN-5: one workspace, many calls -------------------------------------------------------------


@breaks("RUN-5")
class StrideOfLargestCall(Reference):
    """Writes a gather at the stride of this call into a buffer that is read at the stride of the
    largest call so far."""

    def gather(
        self, workspace: Workspace, rows: Tensor, num_tokens: int, *, through_hook: bool = False
    ) -> Tensor:
        ranks, slots = workspace.world_size, rows.shape[0]
        gathered = super().gather(workspace, rows, ranks * slots, through_hook=through_hook)
        old: Tensor | None = getattr(workspace, "_moetail_rows", None)
        if old is None or old.shape[0] <= gathered.shape[0] or old.shape[1:] != gathered.shape[1:]:
            workspace._moetail_rows = gathered.clone()  # type: ignore[attr-defined]
            return gathered[:num_tokens]
        stride = old.shape[0] // ranks
        old[: gathered.shape[0]] = gathered
        read = [old[rank * stride : rank * stride + slots] for rank in range(ranks)]
        return torch.cat(read)[:num_tokens]


@breaks("RUN-5")
class OldRowsAfterAnotherStrategy(Around):
    """Flags of one strategy satisfy the next: after a change of strategy, or of operation, the
    first gather reads the rows that lie there from before."""

    plan = ""

    def around(self, operation: str, call: dict[str, Any], compute: Any) -> Any:
        if "workspace" in call:
            self.plan = f"{operation} {call.get('strategy')}"
        return compute(call)

    def gather(
        self, workspace: Workspace, rows: Tensor, num_tokens: int, *, through_hook: bool = False
    ) -> Tensor:
        gathered = super().gather(workspace, rows, num_tokens, through_hook=through_hook)
        before: tuple[str, Tensor] | None = getattr(workspace, "_moetail_before", None)
        workspace._moetail_before = (self.plan, gathered.clone())  # type: ignore[attr-defined]
        if before is None or before[0] == self.plan or before[1].shape[1:] != gathered.shape[1:]:
            return gathered
        stale = min(len(before[1]), num_tokens)
        return torch.cat([before[1][:stale], gathered[stale:]])


@breaks("RUN-5", source="flashinfer #3053, sglang #38300")
class WaitsForFirstSize(Around):
    """Waits for as many arrivals as the workspace's first call had: a call of another size never
    ends. Here it is given up at once."""

    def around(self, operation: str, call: dict[str, Any], compute: Any) -> Any:
        result = compute(call)
        if "workspace" in call and call["residual"].shape[0]:
            workspace = call["workspace"]
            size = call["residual"].shape[0]
            first = getattr(workspace, "_moetail_first_size", size)
            workspace._moetail_first_size = first
            if size != first:
                raise TimeoutError(f"waiting for the flags of {first} tokens, {size} came")
        return result


# --- RUN-7: negative zeros ------------------------------------------------------------------------


class SignedZeroSum(Reference):
    """Starts a sum with its first product, so that negative zeros stay negative: legal."""

    def reduce(self, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        total = super().reduce(rows, weights, index)
        live = index >= 0
        row = (
            rows[index.clamp(min=0).long()]
            if rows.shape[0]
            else rows.new_zeros((*index.shape, rows.shape[1]))
        )
        product = self.read_weights(weights)[..., None] * row.to(torch.float32)
        negative = (product == 0) & product.signbit() | ~live[..., None]
        negative = negative.all(dim=1) & live.any(dim=1, keepdim=True)
        return torch.where(negative, -0.0, total)

    def finalize_moe_output(self, x: MoEOutput) -> Tensor:
        finalized = super().finalize_moe_output(x)
        if isinstance(x.routed, Tensor) or x.shared_output is not None:
            return finalized
        # A token without a local route is sent as positive zeros, whatever the scale's sign.
        remote = (x.routed.expanded_idx_to_permuted_idx < 0).all(dim=1, keepdim=True)
        return torch.where(remote, torch.zeros_like(finalized), finalized)


@breaks("RUN-7", source="flashinfer #3053, sglang #38300")
class WaitsOnNegativeZero(SignedZeroSum):
    """Takes -0.0 for the mark of a slot that has not arrived, and waits for it. Here it is given
    up at once."""

    def gather(
        self, workspace: Workspace, rows: Tensor, num_tokens: int, *, through_hook: bool = False
    ) -> Tensor:
        gathered = super().gather(workspace, rows, num_tokens, through_hook=through_hook)
        if bool(((gathered == 0) & gathered.signbit()).any()):
            raise TimeoutError("waiting for a slot that holds -0.0")
        return gathered


@breaks("RUN-7")
class NegativeZeroIsOldData(SignedZeroSum):
    """Takes -0.0 for the mark of a slot that has not arrived, and goes on with what was there."""

    def gather(
        self, workspace: Workspace, rows: Tensor, num_tokens: int, *, through_hook: bool = False
    ) -> Tensor:
        gathered = super().gather(workspace, rows, num_tokens, through_hook=through_hook)
        return torch.where(
            (gathered == 0) & gathered.signbit(), torch.ones_like(gathered), gathered
        )
