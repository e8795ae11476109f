"""The eight operations, in the contract's order, from the stages of :mod:`.stages`.

Shapes, dtypes, refusals and rules of each are documented once, in :class:`moetail.spec.MoETail`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moetail.reference.stages import Stages
from moetail.reference.workspace import BeamAllReduceWorkspace
from moetail.spec import (
    ContractError,
    MoEOutput,
    UnfinalizedMoEOutput,
    Workspace,
    checks,
    tokens_per_rank,
)
from moetail.spec.operations import (
    ALLREDUCE,
    BOUNDARY,
    FINALIZE,
    FUSED,
    GATHER,
    MOE_OUTPUT,
    Operation,
)

__all__ = ["Reference", "all_gather"]


def _refuse(rule: str, argument: str, found: str, allowed: str) -> ContractError:
    return ContractError(rule, argument, found, allowed)


def _is_integer(tensor: Tensor) -> bool:
    kind = tensor.dtype
    return not (kind.is_floating_point or kind.is_complex or kind is torch.bool)


def all_gather() -> Callable[..., Any]:
    """torch.distributed's all_gather_into_tensor, which torch 2.13 renamed and warns about."""
    renamed: Callable[..., Any] | None = getattr(dist, "all_gather_single", None)
    return renamed or dist.all_gather_into_tensor


class Reference(Stages):
    """The contract as code. It runs on any device and needs torch alone."""

    BeamAllReduceWorkspace = BeamAllReduceWorkspace

    # --- 1 ------------------------------------------------------------------------------------

    def convert_flashinfer_moe_output(
        self,
        flashinfer_output: Any,
        *,
        do_finalize: bool,
        num_tokens: int,
        top_k: int,
        finalized_output: Tensor | None = None,
    ) -> Tensor | UnfinalizedMoEOutput:
        """See :meth:`moetail.spec.MoETail.convert_flashinfer_moe_output`."""
        for name, number, least in (("num_tokens", num_tokens, 0), ("top_k", top_k, 1)):
            if not isinstance(number, (Integral, torch.SymInt)) or number < least:
                raise _refuse("CONVERT-2", name, repr(number), f"an integer >= {least}")
        if do_finalize:
            return self._converted_finalized(flashinfer_output, finalized_output)
        if finalized_output is not None:
            raise _refuse("CONVERT-2", "finalized_output", "a tensor", "None without do_finalize")
        return self._converted_deferred(flashinfer_output, num_tokens, top_k)

    def _converted_finalized(
        self, flashinfer_output: Any, finalized_output: Tensor | None
    ) -> Tensor:
        result = flashinfer_output
        if isinstance(result, list):
            if len(result) != 1:
                raise _refuse(
                    "CONVERT-2",
                    "flashinfer_output",
                    f"a list of {len(result)}",
                    "a tensor or a list of exactly one tensor, with do_finalize",
                )
            result = result[0]
        if not isinstance(result, Tensor):
            raise _refuse(
                "CONVERT-2",
                "flashinfer_output",
                type(flashinfer_output).__name__
                + (f" of {type(result).__name__}" if isinstance(flashinfer_output, list) else ""),
                "a tensor or a list of exactly one tensor, with do_finalize",
            )
        if finalized_output is None:
            return result
        if not isinstance(finalized_output, Tensor):
            found = type(finalized_output).__name__
            raise _refuse("CONVERT-4", "finalized_output", found, "a tensor, or None")
        aliasing: tuple[tuple[str, object, object], ...] = (
            ("shape", list(result.shape), list(finalized_output.shape)),
            ("dtype", result.dtype, finalized_output.dtype),
            ("device", result.device, finalized_output.device),
            ("data pointer", result.data_ptr(), finalized_output.data_ptr()),
        )
        for what, returned, given in aliasing:
            if returned != given:
                raise _refuse(
                    "CONVERT-4",
                    "finalized_output",
                    f"{what} {given}, where the returned tensor has {returned}",
                    "the tensor that the kernel returned",
                )
        return result

    def _converted_deferred(
        self, flashinfer_output: Any, num_tokens: int, top_k: int
    ) -> UnfinalizedMoEOutput:
        layout = "three tensors [gemm2, weights, map] without do_finalize"
        if not isinstance(flashinfer_output, (list, tuple)):
            found = type(flashinfer_output).__name__
            raise _refuse("CONVERT-2", "flashinfer_output", found, layout)
        if len(flashinfer_output) != 3:
            found = f"{len(flashinfer_output)} items"
            raise _refuse("CONVERT-2", "flashinfer_output", found, layout)
        named = dict(zip(("gemm2", "weights", "map"), flashinfer_output, strict=True))
        for name, tensor in named.items():
            if not isinstance(tensor, Tensor):
                raise _refuse("CONVERT-2", name, type(tensor).__name__, "a tensor")
        rows, weights, index = named.values()
        if rows.dim() != 2:
            raise _refuse("CONVERT-2", "gemm2", f"rank {rows.dim()}", "rank 2, [rows, H]")
        if index.dtype != torch.int32:
            raise _refuse("CONVERT-2", "map", str(index.dtype), "torch.int32")
        routes = num_tokens * top_k
        for name in ("weights", "map"):
            if named[name].numel() != routes:
                raise _refuse(
                    "CONVERT-2",
                    name,
                    f"{named[name].numel()} elements, {list(named[name].shape)}",
                    f"num_tokens * top_k = {num_tokens} * {top_k} = {routes} elements",
                )
        for name, tensor in named.items():
            if tensor.device != rows.device:
                raise _refuse("CONVERT-2", name, str(tensor.device), f"{rows.device}, as gemm2")
            if not tensor.is_contiguous():
                found = f"strides {list(tensor.stride())} for shape {list(tensor.shape)}"
                raise _refuse("CONVERT-2", name, found, "contiguous")
        return UnfinalizedMoEOutput(
            rows, weights.view(num_tokens, top_k), index.view(num_tokens, top_k)
        )

    # --- 2 ------------------------------------------------------------------------------------

    def route_major_moe_output(
        self,
        routes: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        expert_map: Tensor | None,
    ) -> UnfinalizedMoEOutput:
        """See :meth:`moetail.spec.MoETail.route_major_moe_output`."""
        named = {"routes": routes, "topk_weights": topk_weights, "topk_ids": topk_ids}
        if expert_map is not None:
            named["expert_map"] = expert_map
        for name, tensor in named.items():
            if not isinstance(tensor, Tensor):
                raise _refuse("CONVERT-2", name, type(tensor).__name__, "a tensor")
            if tensor.device != routes.device:
                raise _refuse("CONVERT-2", name, str(tensor.device), f"{routes.device}, as routes")
        for name in ("topk_ids", "expert_map"):
            if name in named and not _is_integer(named[name]):
                raise _refuse("CONVERT-2", name, str(named[name].dtype), "an integer dtype")
        if topk_ids.dim() != 2:
            raise _refuse("CONVERT-2", "topk_ids", f"shape {list(topk_ids.shape)}", "[T, top_k]")
        num_tokens, top_k = topk_ids.shape
        if topk_weights.shape != topk_ids.shape:
            raise _refuse(
                "CONVERT-2",
                "topk_weights",
                str(list(topk_weights.shape)),
                f"topk_ids' shape {list(topk_ids.shape)}",
            )
        if routes.shape[:-1] not in ((num_tokens * top_k,), (num_tokens, top_k)):
            raise _refuse(
                "CONVERT-2",
                "routes",
                str(list(routes.shape)),
                f"[{num_tokens * top_k}, H] or [{num_tokens}, {top_k}, H]",
            )
        if not routes.is_contiguous():
            found = f"strides {list(routes.stride())} for shape {list(routes.shape)}"
            raise _refuse("PACK-1", "routes", found, "contiguous")
        if expert_map is not None and expert_map.dim() != 1:
            raise _refuse("CONVERT-2", "expert_map", f"rank {expert_map.dim()}", "rank 1, [E]")
        index = torch.arange(num_tokens * top_k, dtype=torch.int32, device=routes.device)
        index = index.view(num_tokens, top_k)
        if expert_map is not None:
            index = torch.where(self.local_experts(topk_ids, expert_map), index, -1)
        rows = routes.view(num_tokens * top_k, routes.shape[-1])
        return UnfinalizedMoEOutput(rows, topk_weights, index, route_major=True)

    def local_experts(self, topk_ids: Tensor, expert_map: Tensor) -> Tensor:
        """Which of ``[T, K]`` ids are local; a negative id names no expert, so it is not."""
        try:
            local = expert_map[topk_ids.long().clamp(min=0)] >= 0
        except IndexError:
            raise _refuse(
                "CONVERT-2",
                "topk_ids",
                f"expert {int(topk_ids.max())}",
                f"ids below the {expert_map.shape[0]} of expert_map",
            ) from None
        return (topk_ids >= 0) & local

    # --- 3 ------------------------------------------------------------------------------------

    def beam_moe_finalize(
        self,
        expert_outputs: Tensor,
        expert_weights: Tensor,
        output: Tensor,
        routed_scale: float = 1.0,
        post_weight: Tensor | None = None,
        post_eps: float | None = None,
    ) -> Tensor:
        """See :meth:`moetail.spec.MoETail.beam_moe_finalize`."""
        values = self.checked(FINALIZE, locals())
        if not output.shape[0]:
            return output
        return output.copy_(self.finalize(values, output.shape[0], FINALIZE.stages))

    def checked(self, item: Operation, call: dict[str, Any]) -> dict[str, Any]:
        """The values of a call by role, once its arguments have been found legal."""
        checks.check(item, call)
        checks.check_values(item, call)
        return item.values(call)

    def finalize(self, values: dict[str, Any], live: int, stages: Iterable[str]) -> Tensor:
        """The first ``live`` token slots through some stages: BF16 ``[live, H]`` (LIVE-1)."""
        return self.observed(self.through(stages, {**values, **self.live_slots(values, live)}))

    def live_slots(self, values: dict[str, Any], live: int) -> dict[str, Any]:
        """Rows, weights and the identity map of the live slots, which alone are read."""
        rows, weights = values["rows"], values["weights"]
        top_k, hidden_size = weights.shape[1], rows.shape[-1]
        identity = torch.arange(live * top_k, device=rows.device).view(live, top_k)
        rows = rows.view(-1, top_k, hidden_size)[:live].reshape(live * top_k, hidden_size)
        return {"rows": rows, "weights": weights[:live], "map": identity}

    def observed(self, value: Tensor) -> Tensor:
        """What is returned, or leaves the rank: BF16, whatever the contract's steps left."""
        return value.to(torch.bfloat16)

    # --- 4 ------------------------------------------------------------------------------------

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
        """See :meth:`moetail.spec.MoETail.beam_norm_residual_norm`."""
        values = self.checked(BOUNDARY, locals())
        if not x.shape[0]:
            return self.no_tokens(values)
        return self.boundary(values)

    def boundary(
        self, values: dict[str, Any], stages: Iterable[str] = BOUNDARY.stages
    ) -> tuple[Tensor, Tensor | None]:
        """Stages that end in the next norm: (hidden, normalized or None)."""
        made = self.evaluate(stages, values)
        normalized = None if values["next_eps"] is None else self.observed(made["normalized"])
        return self.observed(made["hidden"]), normalized

    def no_tokens(self, values: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Empty outputs for zero tokens; normalized is None exactly when next_eps is (LIVE-2)."""
        hidden = torch.empty_like(values["residual"])
        return hidden, None if values["next_eps"] is None else torch.empty_like(hidden)

    # --- 5 ------------------------------------------------------------------------------------

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
        """See :meth:`moetail.spec.MoETail.beam_moe_finalize_norm_residual_norm`."""
        values = self.checked(FUSED, locals())
        live = residual.shape[0]
        if not live:
            return self.no_tokens(values)
        if strategy == "unfused":
            finalized = self.finalize(values, live, FINALIZE.stages)
            return self.boundary({**values, "rows": finalized}, ("residual", "next norm"))
        return self.boundary({**values, **self.live_slots(values, live)}, FUSED.stages)

    # --- 6 ------------------------------------------------------------------------------------

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
        """See :meth:`moetail.spec.MoETail.beam_moe_finalize_gather_norm_residual_norm`."""
        values = self.checked(GATHER, locals())
        num_tokens = residual.shape[0]
        owned = self.owned(num_tokens, workspace.world_size, workspace.rank)
        if not num_tokens:
            return self.no_tokens(values)
        slots = tokens_per_rank(num_tokens, workspace.world_size)
        finalized = self.finalize_owned(values, slots, len(owned))
        strategy = strategy or self.choose_strategy(num_tokens, workspace)
        if strategy == "twoshot":
            return self.twoshot(values, finalized, owned)
        through_hook = strategy == "unfused"
        gathered = self.gather(workspace, finalized, num_tokens, through_hook=through_hook)
        return self.boundary({**values, "rows": gathered})

    def choose_strategy(self, num_tokens: int, workspace: Workspace) -> str:
        """What strategy None means (OWN-4)."""
        if num_tokens <= workspace.moe_gather_oneshot_max_tokens:
            return "oneshot"
        separate = workspace.moe_gather_separate_norm_min_tokens
        return "unfused" if separate is not None and num_tokens >= separate else "twoshot"

    def finalize_owned(self, values: dict[str, Any], slots: int, live: int) -> Tensor:
        """This rank's ``[L, H]`` for the gather; what it does not own is zero, not read (OWN-2)."""
        finalized = self.finalize(values, live, ("reduce", "round", "scale"))
        padded = finalized.new_zeros((slots, finalized.shape[1]))
        padded[:live] = finalized
        return padded

    def gather(
        self, workspace: Workspace, rows: Tensor, num_tokens: int, *, through_hook: bool = False
    ) -> Tensor:
        """Every rank's ``[L, H]`` as the T tokens' ``[T, H]``."""
        gathered = rows.new_empty((workspace.world_size * rows.shape[0], rows.shape[1]))
        collective = all_gather()
        if through_hook and workspace.all_gather is not None:
            collective = workspace.all_gather
        collective(gathered, rows, group=workspace.device_group)
        return gathered[:num_tokens]

    def twoshot(
        self, values: dict[str, Any], finalized: Tensor, owned: range
    ) -> tuple[Tensor, Tensor | None]:
        """The owner runs the boundary; both outputs are gathered."""
        residual, workspace = values["residual"], values["workspace"]
        own_residual = torch.zeros_like(finalized)
        own_residual[: len(owned)] = residual[owned.start : owned.stop]
        outputs = self.boundary({**values, "rows": finalized, "residual": own_residual})
        num_tokens = residual.shape[0]
        hidden, normalized = (
            None if output is None else self.gather(workspace, output, num_tokens)
            for output in outputs
        )
        assert hidden is not None
        return hidden, normalized

    # --- 8 ------------------------------------------------------------------------------------

    def finalize_moe_output(self, x: MoEOutput) -> Tensor:
        """See :meth:`moetail.spec.MoETail.finalize_moe_output`."""
        values = self.checked(MOE_OUTPUT, {"x": x})
        return self.observed(self.part(values))

    def part(self, values: dict[str, Any]) -> Tensor:
        """This rank's part of the sum over ranks: ``[T, H]``."""
        return self.through(MOE_OUTPUT.stages, values)

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
        """See :meth:`moetail.spec.MoETail.beam_finalize_allreduce_norm_residual_norm`."""
        values = self.checked(ALLREDUCE, locals())
        part = self.part(values)
        if not residual.shape[0]:
            return self.no_tokens(values)
        parts = self.exchange(part, workspace)
        return self.boundary({**values, "rows": parts}, ("all-reduce", *BOUNDARY.stages))

    def exchange(self, part: Tensor, workspace: Workspace) -> Tensor:
        """Every rank's part, ``[W, T, H]``, for the sum over ranks.

        A gather and a sum in the order of ranks: an all-reduce of BF16 would round after every
        step, and one of FP32 may sum in another order on another rank.
        """
        rows = workspace.world_size * part.shape[0]
        gathered = self.gather(workspace, part.contiguous(), rows)
        return gathered.view(workspace.world_size, *part.shape)
