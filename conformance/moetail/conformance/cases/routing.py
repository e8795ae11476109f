"""Which experts a token's routes go to, and which rank holds them."""

from __future__ import annotations

import torch
from torch import Tensor

from moetail.conformance.cases.arithmetic import generator
from moetail.conformance.cases.case import Case
from moetail.conformance.cases.problem import REMOTE, Routing

__all__ = [
    "expert_owners",
    "holed_routing",
    "home_routing",
    "planned_routing",
    "random_routing",
    "spread_routing",
]


def expert_owners(case: Case) -> Tensor:
    """``[E]`` int64: consecutive blocks of the group's experts; REMOTE beyond them."""
    held = min(case.experts, max(1, round(case.experts * case.local)))
    owners = torch.full((case.experts,), REMOTE, dtype=torch.int64)
    owners[:held] = torch.arange(held) * case.shards // held
    return owners


def random_routing(case: Case) -> Routing:
    """K distinct experts a token, uniformly."""
    gen = generator(case.value_key, "routing")
    scores = torch.rand((case.tokens, case.experts), generator=gen)
    ids = scores.argsort(dim=1)[:, : case.top_k]
    return Routing(ids, expert_owners(case))


def home_routing(case: Case) -> Routing:
    """All local routes of token t on rank t mod W, and at least two of them where K allows."""
    token = torch.arange(case.tokens).unsqueeze(1)
    return planned_routing(case, _some_away(case, token.expand(-1, case.top_k) % case.shards))


def spread_routing(case: Case) -> Routing:
    """Route (t, k) on rank (t + k) mod W."""
    token = torch.arange(case.tokens).unsqueeze(1)
    slot = torch.arange(case.top_k).unsqueeze(0)
    return planned_routing(case, _some_away(case, (token + slot) % case.shards))


def holed_routing(case: Case) -> Routing:
    """Many -1 slots: every fourth token has no local route at all, the first and last row have."""
    gen = generator(case.value_key, "holes")
    shape = (case.tokens, case.top_k)
    wanted = torch.randint(0, case.shards, shape, generator=gen)
    if case.local < 1.0:
        wanted[torch.rand(shape, generator=gen) >= min(case.local, 0.7)] = REMOTE
        wanted[1::4] = REMOTE
        if case.tokens:
            wanted[0, 0] = wanted[-1, -1] = 0
    return planned_routing(case, wanted)


def _some_away(case: Case, wanted: Tensor) -> Tensor:
    """Some routes REMOTE, as the case's share of local experts has it; two a token stay."""
    if case.local == 1.0:
        return wanted
    gen = generator(case.value_key, "away")
    away = torch.rand((case.tokens, case.top_k), generator=gen) >= case.local
    order = torch.rand((case.tokens, case.top_k), generator=gen).argsort(1).argsort(1)
    return torch.where(away & (order >= 2), REMOTE, wanted)


def planned_routing(case: Case, wanted: Tensor) -> Routing:
    """Distinct experts of the wanted owners ``[T, K]``, as far as every owner has enough."""
    gen = generator(case.value_key, "routing")
    by_expert = expert_owners(case)
    # Experts of each owner in a random order, dealt to that owner's routes one after another.
    ids = torch.full((case.tokens, case.top_k), -1, dtype=torch.int64)
    spare = torch.rand((case.tokens, case.experts), generator=gen)
    for owner in (REMOTE, *range(case.shards)):
        theirs = torch.where(by_expert == owner, spare, 2.0).argsort(1)
        count = int((by_expert == owner).sum())
        turn = (wanted == owner).long().cumsum(1) - 1
        fits = (wanted == owner) & (turn < count)
        if count:
            picked = theirs.gather(1, turn.clamp(0, case.experts - 1))
            ids = torch.where(fits, picked, ids)
    # An owner with too few experts: its other routes take whatever expert is still free.
    taken = (ids.unsqueeze(2) == torch.arange(case.experts)).any(1)
    free = torch.where(taken, 2.0, spare).argsort(1)
    missing = ids < 0
    ids = torch.where(missing, free.gather(1, (missing.long().cumsum(1) - 1).clamp(min=0)), ids)
    return Routing(ids, by_expert)
