"""How much to check, and where."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Any

from moetail.spec import operation

__all__ = ["PROFILES", "Plan"]

PROFILES = ("quick", "full", "soak")


@dataclass(frozen=True)
class Plan:
    """How much to check, and where.

    Attributes:
        profile: "quick" (half a minute on two cores), "full" (three) or "soak".
        seed: shifts every case's seed; the same plan makes the same cases.
        ranks: the numbers of ranks that distributed operations run with.
        device: "cpu" or "cuda".
        timeout: seconds that a distributed call may take.
        virtual_ranks: all ranks of a distributed operation run on one GPU, in one process.
        keep_workspaces: a workspace serves one trial after the other, where making one takes long;
            what is wrong then is tried on a new one before it is believed.
    """

    profile: str = "quick"
    seed: int = 0
    ranks: tuple[int, ...] = (1, 2, 3, 4, 8)
    device: str = "cpu"
    timeout: float = 60.0
    virtual_ranks: bool = False
    keep_workspaces: bool = False

    def pick(self, quick: int, full: int, soak: int | None = None) -> int:
        """The number for this profile."""
        return {"quick": quick, "full": full, "soak": soak or 4 * full}[self.profile]

    def random(self, *names: object) -> random.Random:
        """A generator of its own for every use, the same in every process."""
        text = "/".join(map(str, (self.seed, self.profile, *names)))
        return random.Random(hashlib.sha256(text.encode()).digest())

    @property
    def shown(self) -> dict[str, Any]:
        """What a report says of the plan."""
        return {
            "profile": self.profile,
            "seed": self.seed,
            "ranks": list(self.ranks),
            "device": self.device,
            **({"virtual_ranks": True} if self.virtual_ranks else {}),
        }

    def group_sizes(self, name: str) -> tuple[int, ...]:
        """The numbers of ranks an operation runs with."""
        return self.ranks if operation(name).distributed else (1,)
