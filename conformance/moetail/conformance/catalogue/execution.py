"""Mutants of how an implementation runs: LIVE-2, RUN-1 to RUN-4."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from moetail.conformance.cases.tensors import mapped, tensors_in
from moetail.conformance.catalogue.around import Around
from moetail.conformance.catalogue.change import breaks
from moetail.reference import Reference
from moetail.spec import OPERATIONS, Step
from moetail.spec.operations import BOUNDARY
from moetail.spec.rules import ALLREDUCE, CONVERT, FINALIZE, MOE_OUTPUT

_WITH_BOUNDARY = tuple(item.name for item in OPERATIONS if item.has_boundary)

Values = dict[str, Any]
Pair = tuple[Tensor, Tensor | None]

# --- LIVE-2: zero tokens --------------------------------------------------------------------------


@breaks("LIVE-2", operations=_WITH_BOUNDARY)
class ZeroTokensLoseNormalized(Reference):
    """Returns None for normalized when there are no tokens."""

    def no_tokens(self, values: Values) -> Pair:
        return super().no_tokens({**values, "next_eps": None})


@breaks("LIVE-2", operations=_WITH_BOUNDARY)
class ZeroTokensInventNormalized(Reference):
    """Returns an empty normalized when there are no tokens, whether or not a next norm is asked."""

    def no_tokens(self, values: Values) -> Pair:
        return super().no_tokens({**values, "next_eps": 0.0})


@breaks("LIVE-2", operations=_WITH_BOUNDARY)
class ZeroTokensLoseTheWidth(Reference):
    """Returns tensors of shape [0] when there are no tokens."""

    def no_tokens(self, values: Values) -> Pair:
        hidden, normalized = super().no_tokens(values)
        return hidden.flatten(), None if normalized is None else normalized.flatten()


@breaks("LIVE-2")
class ZeroTokensRefused(Around):
    """Launches an empty grid, which is an error."""

    def around(self, name: str, call: dict[str, Any], compute: Any) -> Any:
        result = compute(call)
        first = result[0] if isinstance(result, tuple) else result
        if not first.shape[0]:
            raise RuntimeError("invalid configuration argument")
        return result


# --- RUN-1 ----------------------------------------------------------------------------------------


@breaks("RUN-1", also=("ROUTE-2", "PACK-2", "LIVE-1"))
class SumsInArrivalOrder(Reference):
    """Adds the routes as they arrive: in another order on every second run, each of them legal."""

    runs = 0

    def weighted_sum(self, step: Step, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        self.runs += 1
        if self.runs % 2:
            weights, index = weights.flip(1), index.flip(1)
        return super().weighted_sum(step, rows, weights, index)


@breaks("RUN-1", operations=_WITH_BOUNDARY)
class MeanInArrivalOrder(Reference):
    """Sums the squares with atomics: the inverse RMS moves by its permitted 2^-16 between runs."""

    runs = 0

    def boundary(self, values: Values, stages: Iterable[str] = BOUNDARY.stages) -> Pair:
        self.runs += 1
        return super().boundary(values, stages)

    def inverse_rms(self, step: Step, value: Tensor, eps: float) -> Tensor:
        error = 0.98 * 2.0**-16 * (1.0 if self.runs % 2 else -1.0)
        return super().inverse_rms(step, value, eps) * (1.0 + error)


# --- RUN-2 ----------------------------------------------------------------------------------------


@breaks("RUN-2", operations=_WITH_BOUNDARY)
class ResidualUpdatedInPlace(Reference):
    """Adds into the residual, and returns that as hidden."""

    def boundary(self, values: Values, stages: Iterable[str] = BOUNDARY.stages) -> Pair:
        hidden, normalized = super().boundary(values, stages)
        return values["residual"].copy_(hidden), normalized


@breaks("RUN-2")
class WeightsScaledInPlace(Reference):
    """Leaves the routing weights multiplied by the scale."""

    def evaluate(self, stages: Iterable[str], values: Mapping[str, Any]) -> Values:
        made = super().evaluate(stages, values)
        if "reduce" in stages and values["weights"] is not None:
            values["weights"].mul_(values["routed_scale"])
        return made


@breaks("RUN-2")
class RowsWeightedInPlace(Reference):
    """Leaves the expert rows multiplied by their weights."""

    def weighted_sum(self, step: Step, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        total = super().weighted_sum(step, rows, weights, index)
        live = index >= 0
        used = index[live].long()
        rows[used] = (rows[used].float() * self.read_weights(weights)[live, None]).to(rows.dtype)
        return total


@breaks("RUN-2", operations=(MOE_OUTPUT, ALLREDUCE))
class MapClampedInPlace(Reference):
    """Leaves zeros in the map where -1 was."""

    def weighted_sum(self, step: Step, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        total = super().weighted_sum(step, rows, weights, index)
        index.clamp_(min=0)
        return total


@breaks("RUN-2", operations=(MOE_OUTPUT, ALLREDUCE))
class SharedUpdatedInPlace(Reference):
    """Adds into the shared part, and returns that."""

    def part(self, values: Values) -> Tensor:
        part, shared = super().part(values), values["shared_output"]
        return part if shared is None else shared.copy_(part)


@breaks("RUN-2", operations=(CONVERT,))
class MapShiftedInPlace(Reference):
    """Leaves the map's rows shifted by one while it converts, and hands them on so."""

    def _converted_deferred(self, flashinfer_output: Any, num_tokens: int, top_k: int) -> Any:
        made = super()._converted_deferred(flashinfer_output, num_tokens, top_k)
        made.expanded_idx_to_permuted_idx.add_(1)
        return made


# --- RUN-3 ----------------------------------------------------------------------------------------


class Unwritten(Around):
    """Leaves part of every output as it was before the call; new memory holds NaN."""

    def around(self, name: str, call: dict[str, Any], compute: Any) -> Any:
        output = call.get("output")
        if isinstance(output, Tensor):
            before = output.clone()
            result = compute(call)
            self.unwritten(output).copy_(self.unwritten(before))
            return result
        result = compute(call)
        if isinstance(result, Tensor):
            return self.left(result)
        return tuple(None if tensor is None else self.left(tensor) for tensor in result)

    def left(self, tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        self.unwritten(tensor).fill_(torch.nan)
        return tensor

    def unwritten(self, tensor: Tensor) -> Tensor:
        raise NotImplementedError


@breaks("RUN-3")
class LastRowUnwritten(Unwritten):
    """Leaves the last token unwritten."""

    def unwritten(self, tensor: Tensor) -> Tensor:
        return tensor[-1:]


@breaks("RUN-3")
class RowTailUnwritten(Unwritten):
    """Leaves the last eight elements of every row unwritten."""

    def unwritten(self, tensor: Tensor) -> Tensor:
        return tensor[:, -8:]


@breaks("RUN-3", operations=(FINALIZE,))
class NewTensorReturned(Around):
    """Returns a new tensor, and leaves the destination as it was."""

    def around(self, name: str, call: dict[str, Any], compute: Any) -> Any:
        if call["output"].is_contiguous():
            call["output"] = call["output"].clone()
        return compute(call)


@breaks("RUN-3", operations=(FINALIZE,))
class CopyReturned(Around):
    """Fills the destination, and returns a copy of it."""

    def around(self, name: str, call: dict[str, Any], compute: Any) -> Any:
        return compute(call).clone()


# --- RUN-4 ----------------------------------------------------------------------------------------


@breaks("RUN-4", source="DeepGEMM #451")
class ReplaysPreviousCall(Around):
    """Readiness flags are not reset: a second call on the same tensors, as in a graph replay,
    delivers what the first one computed."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[list[weakref.ref[Tensor]], Any, Any]] = {}

    def around(self, name: str, call: dict[str, Any], compute: Any) -> Any:
        tensors = [tensor for _, tensor in tensors_in(call)]
        scalars = [value for value in call.values() if not isinstance(value, Tensor)]
        scalars = [value for value in scalars if isinstance(value, (float, str, tuple))]
        seen = self.seen.get(name)
        if seen is not None and seen[1] == scalars and _same(seen[0], tensors):
            old = seen[2]
            return call["output"].copy_(old) if "output" in call else mapped(old, Tensor.clone)
        result = compute(call)
        kept = mapped(result, Tensor.clone)
        self.seen[name] = ([weakref.ref(tensor) for tensor in tensors], scalars, kept)
        return result


def _same(references: list[weakref.ref[Tensor]], tensors: list[Tensor]) -> bool:
    return len(references) == len(tensors) and all(
        reference() is tensor for reference, tensor in zip(references, tensors, strict=True)
    )
