"""From a case to the arguments of its operation.

A source makes one Problem for all ranks; every rank then wraps its own part. Values therefore never
depend on the layout, and replicated arguments are the same everywhere.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moetail.conformance.cases.arithmetic import generator, integers
from moetail.conformance.cases.case import WEIGHT_DTYPES, Arguments, Case
from moetail.conformance.cases.layouts import (
    capacity_slots,
    identity_rows,
    permuted_rows,
    poisoned,
    route_major_rows,
)
from moetail.conformance.cases.routing import Routing, expert_owners
from moetail.conformance.cases.tensors import mapped, tensors_in
from moetail.spec import MoEOutput, UnfinalizedMoEOutput, owned_tokens, tokens_per_rank
from moetail.spec.rules import (
    ALLREDUCE,
    BOUNDARY,
    CONVERT,
    FINALIZE,
    FUSED,
    GATHER,
    MOE_OUTPUT,
    ROUTE_MAJOR,
)

__all__ = ["Problem", "make_arguments", "problem_of"]


@dataclass
class Problem:
    """The values of a case, for all ranks at once and in no layout.

    Attributes:
        routing: experts and owners of the routes.
        rows: BF16 ``[T, K, H]``, the result of every route; those of REMOTE routes are dropped.
        weights: ``[T, K]`` of the case's dtype.
        finalized: BF16 ``[W, T, H]``, each rank's part where the case has no routes.
        residual: BF16 ``[T, H]``.
        post_weight, next_weight: BF16 ``[H]``.
        shared: BF16 ``[W, T, H]``.
        dead_weights: ``[T, K]``: what the weights of -1 slots hold instead; None keeps them.
        tight: the permuted layout ends with its last referenced row.
    """

    routing: Routing
    rows: Tensor
    weights: Tensor
    finalized: Tensor
    residual: Tensor
    post_weight: Tensor
    next_weight: Tensor
    shared: Tensor
    dead_weights: Tensor | None = None
    tight: bool = False


def _problem(case: Case) -> Problem:
    from moetail.conformance.cases.sources import SOURCE_TABLE

    made = SOURCE_TABLE[case.source].make(case)
    return replace(made, weights=made.weights.to(WEIGHT_DTYPES[case.weights]))


# The ranks of a case follow each other. Small cases come again with the next implementation, of
# which the catalogue has many.
_last = functools.lru_cache(maxsize=1)(_problem)
_small = functools.lru_cache(maxsize=1024)(_problem)
_SMALL = 1 << 15  # elements: 64 KiB of rows


def problem_of(case: Case) -> Problem:
    """The values of a case. Not to be changed: it may be shared by later calls."""
    return (_small if case.elements <= _SMALL else _last)(case)


def make_arguments(case: Case, rank: int, device: torch.device) -> Arguments:
    problem = problem_of(case)
    gen = generator(case.id, "layout", rank)
    made = _MAKERS[case.operation](case, problem, rank, gen)
    moved: Arguments = mapped(made, lambda tensor: tensor.to(device))
    if case.aliased:
        ((_, moved["finalized_output"]),) = tensors_in(moved["flashinfer_output"])
    return moved


def _unfinalized(
    case: Case, problem: Problem, rank: int, gen: torch.Generator
) -> UnfinalizedMoEOutput:
    """Rank's routes in the case's layout; all others are -1."""
    local = problem.routing.owners == rank
    weights = problem.weights.clone()
    if problem.dead_weights is not None:
        weights = torch.where(local, weights, problem.dead_weights.to(weights.dtype))
    if case.layout == "permuted":
        rows, index = permuted_rows(
            problem.rows,
            local,
            problem.routing.ids,
            tile=case.tile,
            poison=case.poison,
            gen=gen,
            tight=problem.tight,
        )
    else:
        rows, index = route_major_rows(problem.rows, local, poison=case.poison, gen=gen)
        if case.capacity:
            extra = case.capacity * case.top_k
            rows = capacity_slots(rows, extra=extra, poison=case.poison, gen=gen)
    return UnfinalizedMoEOutput(rows, weights, index, route_major=case.layout == "route_major")


def _norms(case: Case, problem: Problem) -> Arguments:
    made: Arguments = {}
    for norm in ("post", "next"):
        kind = getattr(case, norm)
        weight: Tensor = getattr(problem, f"{norm}_weight")
        made[f"{norm}_weight"] = weight.clone() if kind == "affine" else None
        made[f"{norm}_eps"] = None if kind == "none" else getattr(case, f"{norm}_eps")
    return made


def _boundary(case: Case, problem: Problem) -> Arguments:
    return {
        "residual": problem.residual.clone(),
        **_norms(case, problem),
        "scales": case.scales,
    }


def _convert(case: Case, problem: Problem, rank: int, gen: torch.Generator) -> Arguments:
    made: Arguments = {
        "do_finalize": case.routed == "finalized",
        "num_tokens": case.tokens,
        "top_k": case.top_k,
    }
    if case.routed == "finalized":
        tensor = problem.finalized[rank].clone()
        return {"flashinfer_output": tensor if case.flat else [tensor], **made}
    x = _unfinalized(case, problem, rank, gen)
    parts = [x.gemm2_permuted, x.expert_weights, x.expanded_idx_to_permuted_idx]
    if case.flat:
        parts[1:] = [part.reshape(-1) for part in parts[1:]]
    return {"flashinfer_output": parts, **made}


def _route_major(case: Case, problem: Problem, rank: int, gen: torch.Generator) -> Arguments:
    x = _unfinalized(case, problem, rank, gen)
    rows = x.gemm2_permuted
    expert_map = None
    if case.local < 1.0:
        owners = expert_owners(case)
        negative = -integers(1, 3, (case.experts,), gen).long()
        expert_map = torch.where(owners == rank, (owners == rank).cumsum(0) - 1, negative)
        expert_map = expert_map.to(torch.int32)
    return {
        "routes": rows if case.flat else rows.view(case.tokens, case.top_k, case.hidden),
        "topk_weights": x.expert_weights,
        "topk_ids": problem.routing.ids.to(torch.int32),
        "expert_map": expert_map,
    }


def _finalize(case: Case, problem: Problem, rank: int, gen: torch.Generator) -> Arguments:
    # Weights may stop anywhere between the live slots and the capacity.
    extra = int(integers(0, case.capacity, (1,), gen))
    weights = capacity_slots(problem.weights, extra=extra, poison=case.poison, gen=gen)
    post = _norms(case, problem)
    return {
        "expert_outputs": capacity_slots(
            problem.rows, extra=case.capacity, poison=case.poison, gen=gen
        ),
        "expert_weights": weights,
        "output": poisoned((case.tokens, case.hidden), case.poison, gen),
        "routed_scale": case.routed_scale,
        "post_weight": post["post_weight"],
        "post_eps": post["post_eps"],
    }


def _only_boundary(case: Case, problem: Problem, rank: int, gen: torch.Generator) -> Arguments:
    return {"x": problem.finalized[0].clone(), **_boundary(case, problem)}


def _identity(case: Case, problem: Problem, rank: int, gen: torch.Generator) -> Arguments:
    owned = range(case.tokens)
    slots = case.tokens
    if case.operation == GATHER:
        owned = owned_tokens(case.tokens, case.ranks, rank)
        slots = tokens_per_rank(case.tokens, case.ranks)
    part = slice(owned.start, owned.stop)
    x = identity_rows(
        problem.rows[part],
        problem.weights[part],
        extra=slots - len(owned) + case.capacity,
        poison=case.poison,
        gen=gen,
    )
    return {
        "x": x,
        **_boundary(case, problem),
        "routed_scale": case.routed_scale,
        "strategy": case.strategy,
    }


def _moe_output(case: Case, problem: Problem, rank: int, gen: torch.Generator) -> Arguments:
    routed: Tensor | UnfinalizedMoEOutput
    if case.routed == "finalized":
        routed = problem.finalized[rank].clone()
    else:
        routed = _unfinalized(case, problem, rank, gen)
    shared = problem.shared[rank].clone() if case.shared else None
    return {"x": MoEOutput(routed, shared, case.routed_scale)}


def _allreduce(case: Case, problem: Problem, rank: int, gen: torch.Generator) -> Arguments:
    return {**_moe_output(case, problem, rank, gen), **_boundary(case, problem)}


_MAKERS = {
    CONVERT: _convert,
    ROUTE_MAJOR: _route_major,
    FINALIZE: _finalize,
    BOUNDARY: _only_boundary,
    FUSED: _identity,
    GATHER: _identity,
    MOE_OUTPUT: _moe_output,
    ALLREDUCE: _allreduce,
}
