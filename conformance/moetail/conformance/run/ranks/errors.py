"""Errors of a call, which say who is at fault: the machine, or which ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from moetail.conformance.run.ranks.messages import Outcome, Where

__all__ = ["PoolError", "RankError", "blame", "blame_late", "died", "names"]


class PoolError(RuntimeError):
    """The machine failed the pool, whatever was to run: its ranks or their server could not be
    started, or ended before the function ran. The next call starts them afresh."""


@dataclass(eq=False, repr=False)
class RankError(RuntimeError):
    """A rank left the others waiting, or died, while its function ran. The pool that raised it has
    been stopped.

    Attributes:
        ranks: those at fault.
        reason: what they did, without what ran.
        details: for each rank that raised or hangs, its stack as text.
    """

    message: str
    ranks: tuple[int, ...] = ()
    reason: str = ""
    details: str = ""

    def __str__(self) -> str:
        return self.message


def blame(
    did: Mapping[int, str], outcomes: Mapping[int, Outcome], operation: str, ranks: int
) -> RankError:
    """For what some of so many ranks did; others may have raised since."""
    reason = message = "; ".join(f"rank {rank} {what}" for rank, what in did.items())
    if len(set(did.values())) == 1:
        reason = next(iter(did.values()))
        message = f"{names(did)} {reason}"
    message += f" in {operation} ({ranks} rank{'s' * (ranks != 1)})"
    traces = {rank: o.error.traceback for rank, o in sorted(outcomes.items()) if o.error}
    return RankError(message, tuple(did), reason, _details(traces))


def blame_late(
    pending: list[int],
    outcomes: Mapping[int, Outcome],
    where: Mapping[int, Where],
    operation: str,
    within: str,
) -> RankError:
    """For not ending in time, when none failed; ``where`` has what ranks say that are pending."""
    collectives = {rank: said.collectives or 0 for rank, said in outcomes.items()}
    collectives |= {rank: said.collectives for rank, said in where.items()}
    front = max(collectives.values(), default=0)
    # A rank that does not even say where it is holds the interpreter, outside any collective.
    late = [rank for rank in sorted({*pending, *outcomes}) if collectives.get(rank, -1) < front]
    late = late or [rank for rank in pending if rank not in where or not where[rank].waiting]
    waiting = [rank for rank in pending if rank not in late]
    if late and waiting:
        early = [rank for rank in late if rank in outcomes]
        within += f" ({names(early)} had returned)" if early else ""
        within += f"; {names(waiting)} wait{'s' * (len(waiting) == 1)} for "
        within += "it" if len(late) == 1 else "them"
        did, what = "did not arrive", f"in {operation}"
    else:
        late, did, what = pending, "did not finish", operation
    stacks = {r: where[r].stack if r in where else "  gives no sign of life" for r in pending}
    message = f"{names(late)} {did} {what} {within}"
    return RankError(message, tuple(late), f"{did} {within}", _details(stacks))


def _details(texts: Mapping[int, str]) -> str:
    return "\n".join(f"rank {rank}:\n{text}" for rank, text in texts.items())


def names(ranks: Collection[int]) -> str:
    """ "rank 1", "ranks 1, 2"."""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def died(code: int | None) -> str:
    return f"died (exit code {'unknown' if code is None else code})"
