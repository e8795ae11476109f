"""Mutants of what is refused, and when: DOMAIN-1, DOMAIN-2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from moetail.conformance.catalogue.around import Around, with_rows, with_tensor
from moetail.conformance.catalogue.change import breaks
from moetail.reference import BeamAllReduceWorkspace, Reference
from moetail.spec import OPERATIONS, checks, operation
from moetail.spec.rules import ALLREDUCE, FINALIZE, FUSED, GATHER, MOE_OUTPUT, WORKSPACE

_BEAM = (FINALIZE, FUSED, GATHER)
_TAILS = tuple(item.name for item in OPERATIONS if item.has_boundary)

# --- DOMAIN-1: one bound not checked --------------------------------------------------------------


@breaks("DOMAIN-1", operations=_BEAM)
class OddHiddenAccepted(Around):
    """Takes an H that is no multiple of 256."""

    def around(self, name: str, call: dict[str, Any], compute: Any) -> Any:
        with patch.object(checks, "HIDDEN_MULTIPLE", 1):
            return compute(call)


@breaks("DOMAIN-1", operations=_BEAM)
class LargeHiddenAccepted(Around):
    """Takes an H above 8192."""

    def around(self, name: str, call: dict[str, Any], compute: Any) -> Any:
        with patch.object(checks, "MAX_HIDDEN", 1 << 30):
            return compute(call)


@breaks("DOMAIN-1", operations=_BEAM)
class LargeTopKAccepted(Around):
    """Takes more than 32 routes a token."""

    def around(self, name: str, call: dict[str, Any], compute: Any) -> Any:
        with patch.object(checks, "MAX_TOP_K", 1 << 30):
            return compute(call)


@breaks("DOMAIN-1", operations=(FINALIZE, FUSED))
class LiveBeyondCapacityAccepted(Around):
    """Reads on past the capacity's last slot; here from the first again."""

    def around(self, name: str, call: dict[str, Any], compute: Any) -> Any:
        item = operation(name)
        needed = item.argument(item.counts).of(call).shape[0]
        if item.shape("rows")[0] == "slots * K":
            needed *= item.argument("weights").of(call).shape[1]

        def enough(rows: Tensor) -> Tensor:
            kept = rows.shape[0]
            return rows[torch.arange(needed) % kept] if 0 < kept < needed else rows

        return compute(with_tensor(name, call, "rows", enough))


@breaks("DOMAIN-1", operations=(FINALIZE, FUSED, MOE_OUTPUT))
class RowsOfAnyDtype(Around):
    """Casts rows of another dtype to BF16."""

    def around(self, name: str, call: dict[str, Any], compute: Any) -> Any:
        return compute(with_rows(name, call, Tensor.bfloat16))


@breaks("DOMAIN-1", operations=(FINALIZE, FUSED))
class WeightsOfAnyDtype(Around):
    """Casts the Beam operations' routing weights to FP32."""

    def around(self, name: str, call: dict[str, Any], compute: Any) -> Any:
        return compute(with_tensor(name, call, "weights", Tensor.float))


@breaks("DOMAIN-1", operations=_TAILS)
class ResidualOfAnyDtype(Around):
    """Casts the residual to BF16."""

    def around(self, name: str, call: dict[str, Any], compute: Any) -> Any:
        return compute(with_tensor(name, call, "residual", Tensor.bfloat16))


@breaks("DOMAIN-1", operations=(FINALIZE, *_TAILS))
class NormWeightWithoutEpsAccepted(Around):
    """Ignores a norm weight that comes without an eps."""

    def around(self, name: str, call: dict[str, Any], compute: Any) -> Any:
        for norm in ("post", "next"):
            if call.get(f"{norm}_eps", 0.0) is None:
                call[f"{norm}_weight"] = None
        return compute(call)


@breaks("DOMAIN-1", operations=(FUSED, GATHER))
class UnknownStrategyAccepted(Around):
    """Takes an unknown strategy for the default."""

    def around(self, name: str, call: dict[str, Any], compute: Any) -> Any:
        if call["strategy"] not in operation(name).strategies:
            call["strategy"] = None
        return compute(call)


@breaks("DOMAIN-1", operations=(GATHER,))
class UnknownStrategyAcceptedForZeroTokens(UnknownStrategyAccepted):
    """Returns early when there are no tokens, before it has looked at the strategy."""

    def around(self, name: str, call: dict[str, Any], compute: Any) -> Any:
        if call["residual"].shape[0]:
            return compute(call)
        return super().around(name, call, compute)


@breaks("DOMAIN-1", operations=(GATHER, ALLREDUCE))
class TooManyTokensAccepted(Around):
    """Takes more tokens than the workspace has room for."""

    def around(self, name: str, call: dict[str, Any], compute: Any) -> Any:
        if call["residual"].shape[0] > call["workspace"].max_tokens:
            call["workspace"] = replace(call["workspace"], max_tokens=call["residual"].shape[0])
        return compute(call)


@breaks("DOMAIN-1", operations=(GATHER, ALLREDUCE))
class OtherHiddenAccepted(Around):
    """Takes rows of another H than the workspace was made for."""

    def around(self, name: str, call: dict[str, Any], compute: Any) -> Any:
        if call["residual"].dim() == 2:
            width = call["residual"].shape[1]
            if width != call["workspace"].hidden_size:
                call["workspace"] = replace(call["workspace"], hidden_size=width)
        return compute(call)


@breaks("DOMAIN-1", operations=(WORKSPACE,))
class WorkspaceForAnyDtype(Reference):
    """Creates a workspace for a payload that it does not support."""

    class BeamAllReduceWorkspace(BeamAllReduceWorkspace):
        @classmethod
        def create(
            cls, group: Any, hidden_size: int, max_tokens: int, dtype: torch.dtype
        ) -> BeamAllReduceWorkspace | None:
            return super().create(group, hidden_size, max_tokens, torch.bfloat16)


@breaks("DOMAIN-1", operations=(WORKSPACE,))
class WorkspaceNotAgreed(Reference):
    """Refuses an unsupported dtype on rank 0, where it is found, and returns None on the others."""

    class BeamAllReduceWorkspace(BeamAllReduceWorkspace):
        @classmethod
        def create(
            cls, group: Any, hidden_size: int, max_tokens: int, dtype: torch.dtype
        ) -> BeamAllReduceWorkspace | None:
            made = super().create(group, hidden_size, max_tokens, dtype)
            if made is None and torch.distributed.get_rank(group) == 0:
                raise RuntimeError(f"unsupported dtype {dtype}")
            return made


# --- DOMAIN-2: refused, but late ------------------------------------------------------------------


@breaks("DOMAIN-2", operations=(FINALIZE,))
class OutputClearedBeforeChecks(Around):
    """Clears the destination before it checks the arguments."""

    def around(self, name: str, call: dict[str, Any], compute: Any) -> Any:
        if isinstance(call["output"], Tensor):
            call["output"].zero_()
        return compute(call)


@breaks("DOMAIN-2", operations=_TAILS)
class ResidualScaledBeforeChecks(Around):
    """Doubles the residual in place before it checks, and undoes it only where it goes on."""

    def around(self, name: str, call: dict[str, Any], compute: Any) -> Any:
        try:
            return compute(call)
        except ValueError:
            residual = call["residual"]
            if isinstance(residual, Tensor) and residual.is_floating_point():
                residual.add_(residual + 1)
            raise


@breaks("DOMAIN-2", operations=(FUSED, GATHER, MOE_OUTPUT, ALLREDUCE))
class WeightsClearedBeforeRefusal(Around):
    """Leaves the routing weights cleared where it refuses."""

    def around(self, name: str, call: dict[str, Any], compute: Any) -> Any:
        try:
            return compute(call)
        except ValueError:
            weights = operation(name).argument("weights").of(call)
            if isinstance(weights, Tensor):
                weights.zero_()
            raise
