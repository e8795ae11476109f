"""The operations as chains of stages.

A chain says, for a range of tokens, which values each rank's first output may have. The next norm
is not in it: it takes the implementation's own ``hidden`` (ROUND-6), so the judge applies it last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moetail.conformance.judge.admissible import Admissible
from moetail.conformance.judge.norm import admit_norm
from moetail.conformance.judge.stages import (
    admit_rank_sum,
    admit_reduction,
    admit_residual,
    admit_round,
    admit_scale,
    admit_shared,
)
from moetail.spec import MoEOutput, UnfinalizedMoEOutput, owned_tokens, tokens_per_rank

Call = Mapping[str, Any]


@dataclass(frozen=True)
class Chain:
    """How to judge one operation on given arguments.

    ``admit(start, stop)`` gives the sets of tokens [start, stop) for each rank. ``names`` are the
    outputs, ``next_norms`` each rank's (weight, eps), eps None for none. ``terms`` is the number of
    float64 terms a token takes, from which the judge chooses how many tokens to take at once.
    """

    shape: tuple[int, int]
    device: torch.device
    terms: int
    names: tuple[str, ...]
    admit: Callable[[int, int], list[Admissible]]
    next_norms: list[tuple[Tensor | None, float | None]] = field(default_factory=list)

    def same_next_norm(self, rank: int, other: int) -> bool:
        """Whether two ranks were given the same next norm."""
        (weight, eps), (other_weight, other_eps) = self.next_norms[rank], self.next_norms[other]
        return eps == other_eps and _equal(weight, other_weight)


def moe_finalize(calls: Sequence[Call]) -> Chain:
    """beam_moe_finalize: reduce, round, scale, post-norm."""
    (call,) = calls
    rows, weights = call["expert_outputs"], call["expert_weights"]
    live, hidden_size = call["output"].shape

    def admit(start: int, stop: int) -> list[Admissible]:
        a = admit_reduction(rows[start:stop], weights[start:stop], None)
        return [_post(_scaled(a, call), call)]

    return Chain((live, hidden_size), rows.device, rows.shape[1] * hidden_size, ("output",), admit)


def norm_residual_norm(calls: Sequence[Call]) -> Chain:
    """beam_norm_residual_norm: the boundary alone."""
    (call,) = calls
    x = call["x"]

    def admit(start: int, stop: int) -> list[Admissible]:
        return [_boundary(Admissible.of(x[start:stop]), call, start, stop)]

    return _chain(calls, x.shape[1], admit)


def moe_finalize_norm_residual_norm(calls: Sequence[Call]) -> Chain:
    """beam_moe_finalize_norm_residual_norm: reduce, round, scale, then the boundary."""
    (call,) = calls
    x: UnfinalizedMoEOutput = call["x"]

    def admit(start: int, stop: int) -> list[Admissible]:
        return [_boundary(_scaled(_reduced(x, start, stop), call), call, start, stop)]

    return _chain(calls, _routes(x) * call["residual"].shape[1], admit)


def moe_finalize_gather_norm_residual_norm(calls: Sequence[Call]) -> Chain:
    """beam_moe_finalize_gather_norm_residual_norm: each token from its owner, then the boundary."""
    world = len(calls)
    tokens = calls[0]["residual"].shape[0]
    slots = tokens_per_rank(tokens, world)

    def admit(start: int, stop: int) -> list[Admissible]:
        parts = []
        for rank, call in enumerate(calls):
            owned = owned_tokens(tokens, world, rank)
            first, last = max(start, owned.start), min(stop, owned.stop)
            if first < last:
                origin = rank * slots
                a = _reduced(call["x"], first - origin, last - origin)
                parts.append(_scaled(a, call))
        return _boundaries(Admissible.cat(parts), calls, start, stop)

    widest = max(_routes(call["x"]) for call in calls)
    return _chain(calls, widest * calls[0]["residual"].shape[1], admit)


def finalize_moe_output(calls: Sequence[Call]) -> Chain:
    """finalize_moe_output: reduce, round, scale, shared; on each rank by itself."""
    (call,) = calls
    x: MoEOutput = call["x"]
    routed = x.routed
    if isinstance(routed, Tensor):
        shape, device = (routed.shape[0], routed.shape[1]), routed.device
    else:
        tokens = routed.expert_weights.shape[0]
        shape, device = (tokens, routed.gemm2_permuted.shape[1]), routed.gemm2_permuted.device

    def admit(start: int, stop: int) -> list[Admissible]:
        return [_finalized(x, start, stop)]

    return Chain(shape, device, _routes(routed) * shape[1], ("output",), admit)


def finalize_allreduce_norm_residual_norm(calls: Sequence[Call]) -> Chain:
    """beam_finalize_allreduce_norm_residual_norm: finalize on each rank, all-reduce, boundary."""

    def admit(start: int, stop: int) -> list[Admissible]:
        parts = [_finalized(call["x"], start, stop) for call in calls]
        return _boundaries(admit_rank_sum(parts), calls, start, stop)

    widest = max(len(calls), *(_routes(call["x"].routed) for call in calls))
    return _chain(calls, widest * calls[0]["residual"].shape[1], admit)


OPERATIONS: Mapping[str, Callable[[Sequence[Call]], Chain]] = {
    "beam_moe_finalize": moe_finalize,
    "beam_norm_residual_norm": norm_residual_norm,
    "beam_moe_finalize_norm_residual_norm": moe_finalize_norm_residual_norm,
    "beam_moe_finalize_gather_norm_residual_norm": moe_finalize_gather_norm_residual_norm,
    "finalize_moe_output": finalize_moe_output,
    "beam_finalize_allreduce_norm_residual_norm": finalize_allreduce_norm_residual_norm,
}

SEVERAL_RANKS = frozenset(
    {
        "beam_moe_finalize_gather_norm_residual_norm",
        "beam_finalize_allreduce_norm_residual_norm",
    }
)
"""The operations that ranks carry out together: the others take the call of one rank."""


def _chain(
    calls: Sequence[Call], terms: int, admit: Callable[[int, int], list[Admissible]]
) -> Chain:
    """A chain that ends in the boundary."""
    residual = calls[0]["residual"]
    norms = [(call.get("next_weight"), call.get("next_eps")) for call in calls]
    shape = (residual.shape[0], residual.shape[1])
    return Chain(shape, residual.device, terms, ("hidden", "normalized"), admit, norms)


def _routes(x: Tensor | UnfinalizedMoEOutput) -> int:
    return 1 if isinstance(x, Tensor) else max(1, x.expert_weights.shape[1])


def _reduced(x: UnfinalizedMoEOutput, start: int, stop: int) -> Admissible:
    return admit_reduction(
        x.gemm2_permuted,
        x.expert_weights[start:stop],
        x.expanded_idx_to_permuted_idx[start:stop],
    )


def _scaled(a: Admissible, call: Call) -> Admissible:
    return admit_scale(admit_round(a), call.get("routed_scale", 1.0))


def _finalized(x: MoEOutput, start: int, stop: int) -> Admissible:
    if isinstance(x.routed, Tensor):
        r = Admissible.of(x.routed[start:stop])
    else:
        r = admit_round(_reduced(x.routed, start, stop))
    s = admit_scale(r, x.routed_scaling_factor)
    return s if x.shared_output is None else admit_shared(s, x.shared_output[start:stop])


def _post(s: Admissible, call: Call) -> Admissible:
    eps = call.get("post_eps")
    return s if eps is None else admit_norm(s, call.get("post_weight"), eps)


def _boundary(s: Admissible, call: Call, start: int, stop: int) -> Admissible:
    return admit_residual(_post(s, call), call["residual"][start:stop], call.get("scales"))


def _boundaries(s: Admissible, calls: Sequence[Call], start: int, stop: int) -> list[Admissible]:
    """The boundary on each rank; computed once where the ranks' arguments agree, as they should."""
    sets: list[Admissible] = []
    for rank, call in enumerate(calls):
        if rank and _agree(call, calls[rank - 1], start, stop):
            sets.append(sets[-1])
        else:
            sets.append(_boundary(s, call, start, stop))
    return sets


def _agree(one: Call, other: Call, start: int, stop: int) -> bool:
    return (
        all(one.get(name) == other.get(name) for name in ("post_eps", "scales"))
        and _equal(one.get("post_weight"), other.get("post_weight"))
        and _equal(one["residual"][start:stop], other["residual"][start:stop])
    )


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one is other or torch.equal(one, other)
