"""What an implementation gives, several ranks one after another in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moetail.conformance.cases.tensors import mapped
from moetail.reference import BeamAllReduceWorkspace, Reference
from moetail.spec import Operation, Workspace, operation

__all__ = ["simulate"]

_Call = Mapping[str, Any]


class _Waits(BaseException):
    """A rank needs the rows of the others; no ``except Exception`` of a mutant may see it."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = rows


class _Exchange(Reference):
    """The reference with its collective replaced by the rows that all ranks have left so far."""

    left: tuple[Tensor, ...] = ()
    turn = 0

    def gather(
        self, workspace: Workspace, rows: Tensor, num_tokens: int, *, through_hook: bool = False
    ) -> Tensor:
        if self.turn == len(self.left):
            raise _Waits(rows)
        self.turn += 1
        return self.left[self.turn - 1][:num_tokens].clone()


def simulate(
    implementation: type[Reference], name: str | Operation, calls: Sequence[_Call]
) -> list[Any]:
    """What each rank returns, one rank after another in this process.

    Every rank runs up to the first gather whose rows are not known; once all are there, all run
    again from the start, and one gather further.
    """
    item = operation(name)
    if not item.distributed:
        copies = mapped(list(calls), Tensor.clone)  # some deviations write into their inputs
        return [getattr(implementation(), item.name)(**call) for call in copies]
    bases = (_Exchange,) if implementation is Reference else (implementation, _Exchange)
    exchanging = type("Simulated", bases, {})
    left: tuple[Tensor, ...] = ()
    while True:
        results, waiting = [], []
        for rank, call in enumerate(calls):
            instance: Any = exchanging()
            instance.left = left
            try:
                workspace = _workspace(item, call, rank, len(calls))
                arguments = {**mapped(call, Tensor.clone), "workspace": workspace}
                results.append(getattr(instance, item.name)(**arguments))
            except _Waits as waits:
                waiting.append(waits.rows)
        if not waiting:
            return results
        if len(waiting) != len(calls):
            raise RuntimeError(f"{len(waiting)} of {len(calls)} ranks wait for the others")
        left = (*left, torch.cat(waiting))


def _workspace(item: Operation, call: _Call, rank: int, ranks: int) -> BeamAllReduceWorkspace:
    tokens, hidden_size = item.argument("residual").of(call).shape
    return BeamAllReduceWorkspace(
        world_size=ranks,
        rank=rank,
        hidden_size=hidden_size,
        max_tokens=tokens,
        device_group=None,  # type: ignore[arg-type]
    )
