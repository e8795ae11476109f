"""What a diagnosis looks at: an implementation's outputs, what is admissible, and what is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moetail.conformance.cases.tensors import mapped
from moetail.conformance.judge import Verdict
from moetail.spec import Operation
from moetail.spec.rules import ALLREDUCE, BOUNDARY, FINALIZE, FUSED, MOE_OUTPUT

__all__ = ["MOST_TERMS", "Evidence", "evidence_of"]

MOST_TERMS = 1 << 20
"""Larger calls are cut to their first wrong tokens (and as many others), where that can be done."""

_Call = Mapping[str, Any]


@dataclass
class _Seen:
    """One output of one rank."""

    rank: int
    place: int
    got: Tensor
    lo: Tensor
    hi: Tensor
    wrong: Tensor

    def match(self, results: Sequence[Any]) -> tuple[int, int]:
        """(wrong elements with the bits that were found, right elements that are right)."""
        value = results[self.rank]
        value = value[self.place] if isinstance(value, (tuple, list)) else value
        if not isinstance(value, Tensor) or value.shape != self.got.shape:
            return 0, 0
        same = (value == self.got) | (value.isnan() & self.got.isnan())
        admitted = same | ((self.lo <= value) & (value <= self.hi))
        return int((same & self.wrong).sum()), int((admitted & ~self.wrong).sum())


@dataclass(frozen=True)
class Evidence:
    """One call of an operation on the CPU, and what the judge said of its elements.

    Attributes:
        operation: that was called.
        calls: each rank's arguments, without its workspace.
        wrong, right: numbers of elements.
    """

    operation: Operation
    calls: Sequence[_Call]
    wrong: int
    right: int
    _seen: Sequence[_Seen]

    def match(self, results: Sequence[Any]) -> tuple[int, float]:
        """(wrong elements with the bits that were found, share of right ones that are right), of
        what an explanation gives on each rank."""
        matches = [item.match(results) for item in self._seen]
        explained, right = (sum(part) for part in zip(*matches, strict=True))
        return explained, right / self.right if self.right else 1.0


def evidence_of(item: Operation, calls: Sequence[_Call], verdict: Verdict) -> Evidence:
    """The evidence of a verdict; of a large call, of some of its tokens."""
    places = [output.name for output in item.outputs]
    seen = []
    for output in verdict.outputs:
        if output.got is not None and output.lo is not None and output.hi is not None:
            parts = (output.got, output.lo, output.hi, output.wrong_mask)
            seen.append(_Seen(output.rank, places.index(output.name), *(x.cpu() for x in parts)))
    kept = _bounded(item.name, mapped(list(calls), Tensor.cpu), seen)
    wrong = sum(int(each.wrong.sum()) for each in seen)
    return Evidence(item, kept, wrong, sum(each.wrong.numel() for each in seen) - wrong, seen)


# --- fewer tokens ---------------------------------------------------------------------------------


def _terms(operation_name: str, call: _Call) -> int:
    if operation_name == BOUNDARY:
        return int(call["x"].numel())
    if operation_name == FINALIZE:
        return int(call["output"].numel() * call["expert_outputs"].shape[1])
    x = call["x"]
    routed: Any = getattr(x, "routed", x)
    if isinstance(routed, Tensor):
        return int(routed.numel())
    return int(routed.expert_weights.numel() * routed.gemm2_permuted.shape[1])


def _cut(operation_name: str, call: _Call, tokens: Tensor) -> dict[str, Any]:
    """The call for some tokens only: what is not a token's own stays."""
    cut = dict(call)
    if "residual" in cut:
        cut["residual"] = cut["residual"][tokens]
    if operation_name == FINALIZE:
        dead = torch.arange(cut["output"].shape[0], cut["expert_outputs"].shape[0])
        cut["expert_outputs"] = cut["expert_outputs"][torch.cat([tokens, dead])]
        cut["expert_weights"] = cut["expert_weights"][tokens]
        cut["output"] = cut["output"][tokens]
        return cut
    if operation_name == BOUNDARY:
        cut["x"] = cut["x"][tokens]
        return cut
    if operation_name == FUSED:
        cut["x"] = _cut_slots(cut["x"], tokens)
        return cut
    x = cut["x"]
    if x.shared_output is not None:
        x = replace(x, shared_output=x.shared_output[tokens])
    if isinstance(x.routed, Tensor):
        routed: Any = x.routed[tokens]
    else:
        # Rows stay, so a route-major output is no longer one: its map says the same.
        routed = replace(
            x.routed,
            expert_weights=x.routed.expert_weights[tokens],
            expanded_idx_to_permuted_idx=x.routed.expanded_idx_to_permuted_idx[tokens],
            route_major=False,
        )
    cut["x"] = replace(x, routed=routed)
    return cut


def _cut_slots(x: Any, tokens: Tensor) -> Any:
    top_k = x.expert_weights.shape[1]
    slots = x.gemm2_permuted.view(-1, top_k, x.gemm2_permuted.shape[1])
    index = torch.arange(len(tokens) * top_k, dtype=torch.int32).view(-1, top_k)
    return replace(
        x,
        gemm2_permuted=slots[tokens].reshape(-1, slots.shape[2]),
        expert_weights=x.expert_weights[tokens],
        expanded_idx_to_permuted_idx=index,
    )


def _bounded(
    operation_name: str, calls: list[dict[str, Any]], evidence: list[_Seen]
) -> list[dict[str, Any]]:
    """Cuts a large call to its first wrong tokens and as many right ones."""
    terms = sum(_terms(operation_name, call) for call in calls)
    local = operation_name in (FINALIZE, BOUNDARY, FUSED, MOE_OUTPUT, ALLREDUCE)
    if terms <= MOST_TERMS or not local:
        return calls
    wrong = torch.stack([item.wrong.any(dim=1) for item in evidence]).any(dim=0)
    most = max(1, wrong.numel() * MOST_TERMS // terms)
    kept = torch.cat([wrong.nonzero()[: (most + 1) // 2], (~wrong).nonzero()[: most // 2]])
    tokens = kept.flatten().sort().values
    for item in evidence:
        for name in ("got", "lo", "hi", "wrong"):
            setattr(item, name, getattr(item, name)[tokens])
    return [_cut(operation_name, call, tokens) for call in calls]
