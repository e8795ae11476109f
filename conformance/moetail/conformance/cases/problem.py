"""The values of a case, before any layout."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch import Tensor

__all__ = ["REMOTE", "Problem", "Routing"]

REMOTE = -1


@dataclass
class Routing:
    """Which experts the routes go to, and who holds these.

    Attributes:
        ids: ``[T, K]`` int64, distinct global experts of each token.
        holders: ``[E]`` int64, the rank that holds an expert, REMOTE where none of the group does.
            Of an operation that does not shard experts, rank 0 holds them all.
    """

    ids: Tensor
    holders: Tensor

    @functools.cached_property
    def owners(self) -> Tensor:
        """``[T, K]`` int64, the rank that holds the expert of each route, or REMOTE."""
        return self.holders[self.ids]


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
