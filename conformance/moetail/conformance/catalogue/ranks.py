"""Mutants of liveness, ownership, and what passes between ranks: LIVE, OWN, RUN-5, RUN-7."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moetail.conformance.catalogue.around import Around
from moetail.conformance.catalogue.change import breaks
from moetail.reference import Reference
from moetail.spec import Contract, Step, Workspace, tokens_per_rank
from moetail.spec.rules import ALLREDUCE, FINALIZE, FUSED, GATHER

Values = dict[str, Any]

# --- LIVE-1 ---------------------------------------------------------------------------------------


def _slots(values: Values) -> Tensor:
    """Rows under the identity map as ``[capacity, K, H]``."""
    rows: Tensor = values["rows"]
    return rows.view(-1, values["weights"].shape[1], rows.shape[-1])


def _with_nan_of(rows: Tensor, dead: Tensor) -> Tensor:
    """Rows plus the sum of others times zero, column by column."""
    if not dead.numel():
        return rows
    masked = (dead.to(torch.float32) * 0.0).flatten(0, -2).sum(dim=0)
    return (rows.to(torch.float32) + masked).to(rows.dtype)


@breaks("LIVE-1", source="vllm #39593", operations=(FINALIZE, FUSED), shows=True)
class DeadSlotsTimesZero(Reference):
    """Sums over the whole capacity with dead slots masked by zero: a NaN there reaches all."""

    def live_slots(self, values: Values, live: int) -> Values:
        made = super().live_slots(values, live)
        return {**made, "rows": _with_nan_of(made["rows"], _slots(values)[live:])}


@breaks("LIVE-1", operations=(FINALIZE, FUSED), shows=True)
class LiveSlotsFromTheEnd(Reference):
    """Takes the last slots of the capacity for the live ones."""

    def live_slots(self, values: Values, live: int) -> Values:
        slots = _slots(values)
        return super().live_slots({**values, "rows": slots[slots.shape[0] - live :]}, live)


@breaks("LIVE-1", operations=(FINALIZE, FUSED), shows=True)
class LastSlotReadAhead(Reference):
    """Adds the slot after the last live one to that one, times zero: a prefetch gone wrong."""

    def live_slots(self, values: Values, live: int) -> Values:
        made, slots = super().live_slots(values, live), _slots(values)
        if 0 < live < slots.shape[0]:
            rows = made["rows"].clone()
            rows[-1] = _with_nan_of(rows[-1], slots[live, :1])
            made["rows"] = rows
        return made


# --- OWN-1 ----------------------------------------------------------------------------------------


class Placing(Reference):
    """Places every rank's gathered rows where ``owned`` says; what nobody owns stays zero."""

    def placed(self, num_tokens: int, world_size: int, rank: int) -> list[int]:
        slots = tokens_per_rank(num_tokens, world_size)
        return list(self.owned(num_tokens, world_size, rank))[:slots]

    def finalize_owned(self, values: Values, slots: int, live: int) -> Tensor:
        return super().finalize_owned(values, slots, min(live, slots))

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

    def twoshot(
        self, values: Values, finalized: Tensor, owned: range
    ) -> tuple[Tensor, Tensor | None]:
        residual, workspace = values["residual"], values["workspace"]
        own = self.placed(residual.shape[0], workspace.world_size, workspace.rank)
        # What the owner reads of the residual it reads where its tokens lie.
        moved = torch.zeros_like(residual)
        moved[: len(own)] = residual[own]
        return super().twoshot({**values, "residual": moved}, finalized, range(len(own)))


@breaks("OWN-1", source="VeOmni #61", shows=True)
class OwnershipFloor(Placing):
    """Divides rounding down: the last tokens belong to nobody."""

    def owned(self, num_tokens: int, world_size: int, rank: int) -> range:
        block = num_tokens // world_size
        return range(rank * block, (rank + 1) * block)


@breaks("OWN-1", shows=True)
class OwnershipRoundRobin(Placing):
    """Deals the tokens to the ranks in turn."""

    def owned(self, num_tokens: int, world_size: int, rank: int) -> range:
        return range(rank, num_tokens, world_size)


@breaks("OWN-1", shows=True)
class OwnershipOffByOne(Placing):
    """Starts every block one token late, and the first token belongs to nobody."""

    def owned(self, num_tokens: int, world_size: int, rank: int) -> range:
        block = tokens_per_rank(num_tokens, world_size)
        return range(min(rank * block + 1, num_tokens), min((rank + 1) * block + 1, num_tokens))


@breaks("OWN-1", shows=True)
class OwnershipBalanced(Placing):
    """Gives the first T mod W ranks one token more than the others, instead of ceil(T / W)."""

    def owned(self, num_tokens: int, world_size: int, rank: int) -> range:
        block, more = divmod(num_tokens, world_size)
        start = rank * block + min(rank, more)
        return range(start, start + block + (rank < more))


@breaks("OWN-1", shows=True)
class LastBlockDropped(Placing):
    """Takes a rank's block that is not full for padding."""

    def owned(self, num_tokens: int, world_size: int, rank: int) -> range:
        own = super().owned(num_tokens, world_size, rank)
        full = len(own) == tokens_per_rank(num_tokens, world_size)
        return own if full else range(num_tokens, num_tokens)


# --- OWN-2 ----------------------------------------------------------------------------------------


@breaks("OWN-2", also=("LIVE-1",), shows=True)
class CapacityGathered(Reference):
    """Every rank contributes all its slots, capacity included, which moves the later tokens."""

    def finalize_owned(self, values: Values, slots: int, live: int) -> Tensor:
        every = min(_slots(values).shape[0], values["weights"].shape[0])
        return super().finalize_owned(values, every, every)


@breaks("OWN-2", shows=True)
class PaddingRowsMasked(Reference):
    """Finalizes padding too, and masks the gathered rows past T by zero: a NaN there spreads."""

    def finalize_owned(self, values: Values, slots: int, live: int) -> Tensor:
        return super().finalize_owned(values, slots, slots)

    def gather(
        self, workspace: Workspace, rows: Tensor, num_tokens: int, *, through_hook: bool = False
    ) -> Tensor:
        every = workspace.world_size * rows.shape[0]
        gathered = super().gather(workspace, rows, every, through_hook=through_hook)
        return _with_nan_of(gathered[:num_tokens], gathered[num_tokens:])


@breaks("OWN-2", shows=True)
class PaddingTimesZero(Reference):
    """Masks the padding of the last ranks by zero: a NaN there reaches the owned tokens."""

    def finalize_owned(self, values: Values, slots: int, live: int) -> Tensor:
        finalized = super().finalize_owned(values, slots, live)
        finalized[:live] = _with_nan_of(finalized[:live], _slots(values)[live:slots])
        return finalized


# --- OWN-3: each rank admissible, and the ranks different -----------------------------------------


@breaks("OWN-3", operations=(ALLREDUCE,))
class SumsFromOwnRank(Reference):
    """Every rank starts the sum over ranks with its own part."""

    def exchange(self, part: Tensor, workspace: Workspace) -> Tensor:
        return super().exchange(part, workspace).roll(-workspace.rank, 0)


@breaks("OWN-3", operations=(GATHER,))
class OwnRowsInAnotherOrder(Reference):
    """Finalizes the rows it sends in one order, and the rows it keeps in the reverse order."""

    kept = torch.empty(0)
    reverse = False

    def weighted_sum(self, step: Step, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        if self.reverse:
            weights, index = weights.flip(1), index.flip(1)
        return super().weighted_sum(step, rows, weights, index)

    def finalize_owned(self, values: Values, slots: int, live: int) -> Tensor:
        self.reverse = True
        try:
            self.kept = super().finalize_owned(values, slots, live)[:live]
        finally:
            self.reverse = False
        return super().finalize_owned(values, slots, live)

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


@breaks("OWN-3")
class InverseDependsOnRank(Reference):
    """The inverse RMS errs by its permitted 2^-16, up on even ranks and down on odd ones."""

    def contract_of(self, values: Mapping[str, Any]) -> Contract:
        error = 0.98 * 2.0**-16 * (-1.0 if values["workspace"].rank % 2 else 1.0)
        return super().contract_of(values).each("inverse_rms", error=error)

    def choose_strategy(self, num_tokens: int, workspace: Workspace) -> str:
        return "oneshot"  # in which every rank runs the boundary


# --- OWN-4: strategies ----------------------------------------------------------------------------


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

    def around(self, name: str, call: dict[str, Any], compute: Any) -> Any:
        if "workspace" in call:
            self.plan = f"{name} {call.get('strategy')}"
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

    def around(self, name: str, call: dict[str, Any], compute: Any) -> Any:
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

    def weighted_sum(self, step: Step, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        total = super().weighted_sum(step, rows, weights, index)
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

    def part(self, values: Values) -> Tensor:
        part = super().part(values)
        if values["map"] is None or values["shared_output"] is not None:
            return part
        # A token without a local route is sent as positive zeros, whatever the scale's sign.
        remote = (values["map"] < 0).all(dim=1, keepdim=True)
        return torch.where(remote, torch.zeros_like(part), part)


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
