"""Mutants of the two conversions: CONVERT, PACK-3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moetail.conformance.catalogue.around import Around
from moetail.conformance.catalogue.change import breaks
from moetail.reference import Reference
from moetail.spec import UnfinalizedMoEOutput
from moetail.spec.rules import CONVERT, ROUTE_MAJOR

_CONVERT = (CONVERT,)
_ROUTE_MAJOR = (ROUTE_MAJOR,)


class Deferred(Reference):
    """The conversion's deferred and finalized halves with their inputs changed first."""

    def _converted_deferred(
        self, flashinfer_output: Any, num_tokens: int, top_k: int
    ) -> UnfinalizedMoEOutput:
        if isinstance(flashinfer_output, (list, tuple)) and len(flashinfer_output) == 3:
            parts = list(flashinfer_output)
            if all(isinstance(part, Tensor) for part in parts):
                flashinfer_output = self.changed(parts, num_tokens, top_k)
        return super()._converted_deferred(flashinfer_output, num_tokens, top_k)

    def changed(self, parts: list[Tensor], num_tokens: int, top_k: int) -> list[Tensor]:
        raise NotImplementedError


# --- CONVERT-1: legal layouts accepted ------------------------------------------------------------


@breaks("CONVERT-1", operations=_CONVERT)
class FlatMapRefused(Deferred):
    """Insists on a map and weights of shape [T, K]."""

    def changed(self, parts: list[Tensor], num_tokens: int, top_k: int) -> list[Tensor]:
        if any(part.shape != (num_tokens, top_k) for part in parts[1:]):
            raise ValueError("weights and map must be [num_tokens, top_k]")
        return parts


@breaks("CONVERT-1", source="sglang #28574", operations=_CONVERT)
class TopKFromLastDimension(Reference):
    """Takes top_k from the map's last dimension, which a flat map does not have."""

    def _converted_deferred(
        self, flashinfer_output: Any, num_tokens: int, top_k: int
    ) -> UnfinalizedMoEOutput:
        made = super()._converted_deferred(flashinfer_output, num_tokens, top_k)
        last = flashinfer_output[2].shape[-1] if num_tokens else top_k
        return replace(
            made,
            expert_weights=made.expert_weights.view(-1, last),
            expanded_idx_to_permuted_idx=made.expanded_idx_to_permuted_idx.view(-1, last),
        )


@breaks("CONVERT-1", operations=_CONVERT)
class BareTensorRefused(Reference):
    """Insists on a list of one tensor where the producer finalized."""

    def _converted_finalized(
        self, flashinfer_output: Any, finalized_output: Tensor | None
    ) -> Tensor:
        if not isinstance(flashinfer_output, list):
            raise ValueError("flashinfer_output must be a list of one tensor")
        return super()._converted_finalized(flashinfer_output, finalized_output)


@breaks("CONVERT-1")
class ZeroTokensNotConverted(Around):
    """Refuses zero tokens."""

    def around(self, name: str, call: dict[str, Any], compute: Any) -> Any:
        ids = call.get("topk_ids")
        deferred = ids is None and not call["do_finalize"]
        if (deferred and call["num_tokens"] == 0) or (ids is not None and not ids.shape[0]):
            raise ValueError("there must be tokens")
        return compute(call)


@breaks("CONVERT-1", operations=_ROUTE_MAJOR)
class ThreeDimensionalRoutesRefused(Around):
    """Insists on routes of shape [T * K, H]."""

    def around(self, name: str, call: dict[str, Any], compute: Any) -> Any:
        if call["routes"].dim() != 2:
            raise ValueError("routes must be [T * K, H]")
        return compute(call)


# --- CONVERT-2: illegal layouts refused -----------------------------------------------------------


@breaks("CONVERT-2", operations=_CONVERT)
class NegativeTokensAccepted(Around):
    """Takes a negative num_tokens for zero."""

    def around(self, name: str, call: dict[str, Any], compute: Any) -> Any:
        if call["num_tokens"] < 0:
            call["num_tokens"] = 0
            if not call["do_finalize"]:
                rows, weights, index = call["flashinfer_output"]
                call["flashinfer_output"] = [rows, weights.flatten()[:0], index.flatten()[:0]]
        return compute(call)


@breaks("CONVERT-2", operations=_CONVERT)
class LongListAccepted(Around):
    """Takes the first of several tensors where the producer finalized."""

    def around(self, name: str, call: dict[str, Any], compute: Any) -> Any:
        returned = call["flashinfer_output"]
        if call["do_finalize"] and isinstance(returned, (list, tuple)) and returned:
            call["flashinfer_output"] = returned[0]
        return compute(call)


@breaks("CONVERT-2", operations=_CONVERT)
class DestinationIgnoredWhenDeferred(Around):
    """Ignores a destination that is given without do_finalize."""

    def around(self, name: str, call: dict[str, Any], compute: Any) -> Any:
        if not call["do_finalize"]:
            call["finalized_output"] = None
        return compute(call)


@breaks("CONVERT-2", operations=_CONVERT, also=("CONVERT-3",))
class Int64MapAccepted(Deferred):
    """Casts a map of another dtype to int32."""

    def changed(self, parts: list[Tensor], num_tokens: int, top_k: int) -> list[Tensor]:
        return [*parts[:2], parts[2].to(torch.int32)]


@breaks("CONVERT-2", operations=_CONVERT)
class TopKGuessed(Deferred):
    """Cuts weights or a map of too many elements to T * K."""

    def changed(self, parts: list[Tensor], num_tokens: int, top_k: int) -> list[Tensor]:
        routes = num_tokens * top_k
        if all(part.is_contiguous() and part.numel() >= routes for part in parts[1:]):
            parts[1:] = [part.view(-1)[:routes] for part in parts[1:]]
        return parts


@breaks("CONVERT-2", operations=_CONVERT)
class ThreeDimensionalRowsAccepted(Deferred):
    """Flattens gemm2 of rank 3."""

    def changed(self, parts: list[Tensor], num_tokens: int, top_k: int) -> list[Tensor]:
        rows = parts[0]
        return [rows.flatten(0, -2) if rows.dim() > 2 else rows, *parts[1:]]


@breaks("CONVERT-2", operations=_CONVERT, also=("CONVERT-3",))
class StridedPartsAccepted(Deferred):
    """Makes rows, weights and a map that are not contiguous so."""

    def changed(self, parts: list[Tensor], num_tokens: int, top_k: int) -> list[Tensor]:
        return [part.contiguous() for part in parts]


# --- CONVERT-3: nothing is copied -----------------------------------------------------------------


def _cloned(part: Tensor) -> Tensor:
    """A copy; of a tensor that must be refused, itself."""
    return part.clone() if part.is_contiguous() else part


@breaks("CONVERT-3", operations=_CONVERT)
class RowsCloned(Deferred):
    """Clones the rows."""

    def changed(self, parts: list[Tensor], num_tokens: int, top_k: int) -> list[Tensor]:
        return [_cloned(parts[0]), *parts[1:]]


@breaks("CONVERT-3", operations=_CONVERT)
class WeightsCast(Deferred):
    """Casts weights of a narrower dtype to FP32."""

    def changed(self, parts: list[Tensor], num_tokens: int, top_k: int) -> list[Tensor]:
        return [parts[0], parts[1].to(torch.float32), parts[2]]


@breaks("CONVERT-3", operations=_CONVERT)
class MapCloned(Deferred):
    """Clones the map."""

    def changed(self, parts: list[Tensor], num_tokens: int, top_k: int) -> list[Tensor]:
        return [*parts[:2], _cloned(parts[2])]


@breaks("CONVERT-3", operations=_ROUTE_MAJOR)
class RouteMajorCopies(Around):
    """Clones rows and weights on the way."""

    def around(self, name: str, call: dict[str, Any], compute: Any) -> Any:
        made = compute(call)
        return replace(
            made,
            gemm2_permuted=made.gemm2_permuted.clone(),
            expert_weights=made.expert_weights.clone(),
        )


# --- CONVERT-4: the destination is what comes back ------------------------------------------------


@breaks("CONVERT-4", operations=_CONVERT)
class AliasUnchecked(Around):
    """Never compares the returned tensor with the destination."""

    def around(self, name: str, call: dict[str, Any], compute: Any) -> Any:
        if call["do_finalize"]:
            call["finalized_output"] = None
        return compute(call)


@breaks("CONVERT-4", operations=_CONVERT)
class AliasByShape(Around):
    """Compares shape, dtype and device with the destination's, but no data pointer."""

    def around(self, name: str, call: dict[str, Any], compute: Any) -> Any:
        returned, destination = call["flashinfer_output"], call["finalized_output"]
        if isinstance(returned, list) and len(returned) == 1:
            returned = returned[0]
        if (
            call["do_finalize"]
            and isinstance(returned, Tensor)
            and isinstance(destination, Tensor)
            and returned.shape == destination.shape
            and returned.dtype == destination.dtype
        ):
            call["finalized_output"] = returned
        return compute(call)


@breaks("CONVERT-4", operations=_CONVERT)
class DestinationCopied(Reference):
    """Returns a copy where a destination was given."""

    def _converted_finalized(
        self, flashinfer_output: Any, finalized_output: Tensor | None
    ) -> Tensor:
        result = super()._converted_finalized(flashinfer_output, finalized_output)
        return result if finalized_output is None else result.clone()


# --- PACK-3: route-major --------------------------------------------------------------------------


class RouteMajor(Around):
    """The route-major wrapper with its result changed."""

    def around(self, name: str, call: dict[str, Any], compute: Any) -> Any:
        made = compute(call)
        return self.changed_output(made)

    def changed_output(self, made: UnfinalizedMoEOutput) -> UnfinalizedMoEOutput:
        raise NotImplementedError


@breaks("PACK-3", operations=_ROUTE_MAJOR)
class OnlyMinusOneIsRemote(Reference):
    """Takes experts of a negative number other than -1 for local."""

    def local_experts(self, topk_ids: Tensor, expert_map: Tensor) -> Tensor:
        return (topk_ids >= 0) & (expert_map[topk_ids.long()] != -1)


@breaks("PACK-3", operations=_ROUTE_MAJOR)
class ExpertMapIgnored(Reference):
    """Leaves the identity in the slots of remote experts."""

    def local_experts(self, topk_ids: Tensor, expert_map: Tensor) -> Tensor:
        return torch.ones_like(topk_ids, dtype=torch.bool)


@breaks("PACK-3", operations=_ROUTE_MAJOR)
class LocalRowsCompacted(RouteMajor):
    """Numbers the local routes one after another."""

    def changed_output(self, made: UnfinalizedMoEOutput) -> UnfinalizedMoEOutput:
        index = made.expanded_idx_to_permuted_idx
        live = index.flatten() >= 0
        packed = torch.where(live, live.cumsum(0) - 1, -1).to(torch.int32).view_as(index)
        return replace(made, expanded_idx_to_permuted_idx=packed)


@breaks("PACK-3", operations=_ROUTE_MAJOR)
class Int64RouteMajorMap(RouteMajor):
    """Returns the map as int64."""

    def changed_output(self, made: UnfinalizedMoEOutput) -> UnfinalizedMoEOutput:
        index = made.expanded_idx_to_permuted_idx.long()
        return replace(made, expanded_idx_to_permuted_idx=index)


@breaks("PACK-3", operations=_ROUTE_MAJOR)
class RouteMajorNotMarked(RouteMajor):
    """Does not say that the output is route-major."""

    def changed_output(self, made: UnfinalizedMoEOutput) -> UnfinalizedMoEOutput:
        return replace(made, route_major=False)
