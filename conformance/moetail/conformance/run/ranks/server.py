"""The server's process: it forks the ranks, hands calls to them, and says what came of each."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import pickle
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from moetail.conformance.run.ranks.errors import (
    PoolError,
    RankError,
    blame,
    blame_late,
    died,
    names,
)
from moetail.conformance.run.ranks.messages import BEGUN, Outcome, Where
from moetail.conformance.run.ranks.rank import Rank

__all__ = ["Answer", "serve"]

_START_TIMEOUT = 180.0
_WHERE_TIMEOUT = 5.0


class Answer(NamedTuple):
    """What came of a call, the ranks' process ids, and which ranks had died before, in words."""

    result: list[Outcome] | Exception
    pids: tuple[int, ...]
    dead: str


def serve(descriptor: int, size: int, device: str, folder: str, modules: list[str]) -> None:
    """Answer the calls that come on a connection, until the parent is gone.

    Args:
        size, device: of the pool.
        folder: a temporary one of the pool's own.
        modules: what to import first, as far as it is there: only a matter of speed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    for module in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(module)  # whoever needs it will say why it does not import
    control = Connection(descriptor)
    server = _Server(size, device, folder, control)
    try:
        while True:
            control.send(server.answer(*control.recv()))
    except (EOFError, OSError):
        pass  # the parent is gone
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        server.end()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)  # taking the interpreter and torch down in order takes half a second


class _Server:
    def __init__(self, size: int, device: str, folder: str, control: Connection) -> None:
        self.size, self.device, self.control = size, device, control
        self.stores = (os.path.join(folder, str(number)) for number in itertools.count())
        self.ranks: list[Rank] = []
        self.groups: set[int] = set()  # sizes of those that the ranks have made
        self.grace = self.deadline = 0.0

    def answer(
        self, ranks: int, function: bytes, operation: str, limit: float, grace: float
    ) -> Answer:
        """Have the first ranks call a pickled function with its arguments."""
        codes = {rank.number: rank.exitcode for rank in self.ranks}
        dead = [f"rank {rank} {died(code)}" for rank, code in codes.items() if code is not None]
        if dead:
            self.end()
        result: list[Outcome] | Exception
        try:
            self.grace = grace
            self.prepare(ranks)
            result = self.ask(ranks, (ranks, function), operation, limit)
            ends = {(outcome.error is None, outcome.collectives) for outcome in result}
            if len(ends) > 1 or (False, None) in ends:
                self.end()  # a collective may be half done, or the GPU unusable
        except Exception as error:
            self.end()
            known = isinstance(error, PoolError | RankError)
            result = error if known else PoolError(f"{type(error).__name__}: {error}")
        return Answer(result, tuple(rank.pid or 0 for rank in self.ranks), "; ".join(dead))

    def prepare(self, ranks: int) -> None:
        """The ranks and their group for the call: what fails here is not the function's fault."""
        try:
            if not self.ranks:
                self.start()
            for size in (self.size, ranks):
                if size in self.groups:
                    continue
                what = f"making a group of {size} ranks"
                for outcome in self.ask(self.size, (size, None), what, _START_TIMEOUT):
                    if outcome.error is not None:
                        raise RuntimeError(f"rank {outcome.rank}: {outcome.error.message}")
                self.groups.add(size)
        except Exception as error:
            why = str(error) or type(error).__name__
            raise PoolError(f"the rank pool did not start: {why}") from error

    def start(self) -> None:
        store = next(self.stores)
        for number in range(self.size):
            others = [self.control, *(rank.servers_end for rank in self.ranks)]
            rank = Rank(number, self.size, self.device, store, others)
            rank.start()
            rank.end.close()
            self.ranks.append(rank)

    def end(self) -> None:
        """Kill and reap the ranks and, since each leads a process group, what they have started."""
        for rank in self.ranks:
            rank.kill()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.pid or 0, signal.SIGKILL)
        for rank in self.ranks:
            rank.join()
            rank.servers_end.close()
        self.ranks.clear()
        self.groups.clear()

    def ask(
        self, ranks: int, request: tuple[int, bytes | None], operation: str, limit: float
    ) -> list[Outcome]:
        """What the first ranks answer; an error says who is to blame where some do not."""
        self.deadline = time.monotonic() + limit
        pending = {rank.servers_end: rank.number for rank in self.ranks[:ranks]}
        outcomes: dict[int, Outcome] = {}
        begun: set[int] = set()
        lost: set[int] = set()
        for connection, message in self.exchange(pickle.dumps(request), pending):
            if message == BEGUN:
                begun.add(pending[connection])
                continue
            rank = pending.pop(connection)
            if message is None:
                lost.add(rank)
            else:
                outcomes[rank] = pickle.loads(message)
            if message is None or outcomes[rank].error is not None:
                self.deadline = min(self.deadline, time.monotonic() + self.grace)
        if lost:
            codes = {rank: self.exit_code(rank) for rank in sorted(lost & begun or lost)}
            did = {rank: died(code) for rank, code in codes.items()}
            error = blame(did, outcomes, operation, ranks)
            raise error if lost & begun else PoolError(f"{error}, before it began")
        if not pending:
            return [outcomes[rank] for rank in range(ranks)]
        raised = {rank: outcome.error for rank, outcome in sorted(outcomes.items())}
        if did := {rank: f"raised {e.type}: {e.message}" for rank, e in raised.items() if e}:
            raise blame(did, outcomes, operation, ranks)
        missing = sorted(pending.values())
        within = f"within {limit:g} s"
        if idle := [rank for rank in missing if rank not in begun]:
            raise PoolError(f"{names(idle)} did not begin {operation} {within}")
        raise blame_late(missing, outcomes, self.where(pending), operation, within)

    def exit_code(self, rank: int) -> int | None:
        self.ranks[rank].join(1.0)
        return self.ranks[rank].exitcode

    def where(self, pending: dict[Connection, int]) -> dict[int, Where]:
        """Where ranks are that have not answered; without those that do not say."""
        self.deadline = time.monotonic() + _WHERE_TIMEOUT
        found: dict[int, Where] = {}
        for connection, message in self.exchange(b"", pending):
            said = None if message is None else pickle.loads(message)
            if isinstance(said, Where):
                found[pending[connection]] = said
            if not isinstance(said, Outcome):  # which comes too late
                del pending[connection]
        return found

    def exchange(
        self, message: bytes, pending: dict[Connection, int]
    ) -> Iterator[tuple[Connection, bytes | None]]:
        """Send a message to ranks, and yield what those say that are still pending, until the
        deadline; a rank that is gone says None. It is the parent who ends the waiting for the rest
        of a message."""
        for connection in list(pending):
            try:
                connection.send_bytes(message)
            except OSError:
                yield connection, None
        while pending and (left := self.deadline - time.monotonic()) > 0:
            ready: list[Any] = wait([self.control, *pending], left)
            for connection in ready:
                if connection is self.control:
                    sys.exit()  # the parent is gone, or has given up
                try:
                    yield connection, connection.recv_bytes()
                except (EOFError, OSError):
                    yield connection, None
