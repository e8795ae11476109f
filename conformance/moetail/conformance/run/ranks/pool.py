"""The pool as its callers see it: calls with a deadline, and who is to blame when one fails."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from typing import Any

from moetail.conformance.run.ranks.errors import PoolError, died
from moetail.conformance.run.ranks.messages import Outcome, dumps
from moetail.conformance.run.ranks.server import Answer

__all__ = ["RankPool"]

PRELOAD: tuple[str, ...] = (
    "moetail.conformance.run.virtual",
    "moetail.conformance.catalogue",
)
"""What the server imports before it forks."""

# Seconds that the server gets, beyond a call's, to start ranks; and to end.
_PATIENCE = 600.0
_ENDING = 10.0
_BOOTSTRAP = """import sys
descriptor, size, device, folder, modules, *sys.path[:] = sys.argv[1:]
from moetail.conformance.run.ranks.server import serve
serve(int(descriptor), int(size), device, folder, modules.split())"""


class RankPool:
    """Rank processes that run functions, started on first use and reused.

    Args:
        size: how many ranks there are; a call may take the first few of them.
        device: "cpu" (gloo) or "cuda" (NCCL, rank r on ``cuda:r``).
        timeout: seconds that a call may take.
        grace: seconds that the other ranks get once one has failed, to fail or finish too.
        environment: more variables for the ranks; what the user has set stays.

    Threads may share a pool; their calls run one after the other.
    """

    def __init__(
        self,
        size: int = 8,
        *,
        device: str = "cpu",
        timeout: float = 60.0,
        grace: float = 3.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        if size < 1:
            raise ValueError(f"a pool needs at least one rank, not {size}")
        if device not in ("cpu", "cuda"):
            raise ValueError(f"the ranks run on 'cpu' or 'cuda', not {device!r}")
        self.size = size
        self.device = device
        self.timeout = timeout
        self.grace = grace
        self.environment = dict(environment or {})
        self._pids: tuple[int, ...] = ()
        self._last = "its start"
        self._closed = False
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: Connection | None = None
        self._folder = ""
        _POOLS.add(self)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids in rank order; empty while the pool is not running."""
        return self._pids

    def close(self) -> None:
        """End every process of the pool, at once, a running call's included."""
        self._closed = True
        process = self._process
        if process is not None:
            process.terminate()  # whatever another thread does here
        with self._lock:
            self._end()

    def run(
        self,
        ranks: int,
        function: Callable[..., Any],
        *args: Any,
        operation: str,
        timeout: float | None = None,
    ) -> list[Outcome]:
        """``function(group, rank, *args)`` on ranks 0 to ``ranks - 1`` of a group of just those.

        Args:
            ranks: how many, at most the pool's size; 1 makes a group of one.
            function: a module-level function that the ranks can import. It must not make groups of
                its own, since not every rank of the pool would take part.
            args: the same for every rank. Tensors in arguments and results, however deeply nested,
                travel by value and arrive on the CPU, bit for bit, with their shape and strides;
                two of them never share memory afterwards.
            operation: names the call in errors.
            timeout: replaces the pool's.

        Returns:
            The outcomes in rank order, when every rank returned or raised. Where some raised and
            others returned, or they took part in different numbers of collectives, the ranks are
            restarted before the next call, since a collective may be half done.

        Raises:
            RankError: while the function ran, some ranks raised and others hang, or a rank died or
                did not finish in time. The next call starts the ranks afresh.
            PoolError: the ranks do not start, or some or their server ended before they called the
                function.
        """
        if not 1 <= ranks <= self.size:
            raise ValueError(f"{operation}: {ranks} ranks, but the pool has 1 to {self.size}")
        limit = self.timeout if timeout is None else timeout
        call = (ranks, dumps((function, args)), operation, limit, self.grace)
        with self._lock:
            if self._closed:
                raise RuntimeError("the rank pool is closed")
            try:
                result, self._pids, dead = self._ask(call, operation, limit)
            except BaseException:
                self._end()
                if self._closed:
                    raise RuntimeError(f"the rank pool was closed during {operation}") from None
                raise
            if dead:
                text = f"{dead} after {self._last}; the pool starts again"
                warnings.warn(text, RuntimeWarning, stacklevel=2)
            self._last = operation
        if isinstance(result, Exception):
            raise result
        return [o if o.error else replace(o, value=pickle.loads(o.value)) for o in result]

    def _ask(self, call: tuple[Any, ...], operation: str, limit: float) -> Answer:
        """What the server says, which is started where there is none."""
        dead = self._dead()
        if dead or self._control is None:
            self._end()
            try:
                self._launch()
            except OSError as error:
                raise PoolError(f"the rank pool did not start: {error}") from error
        assert self._control is not None
        try:
            self._control.send(call)
            if not self._control.poll(limit + _PATIENCE):
                raise PoolError(f"the server of the ranks hangs in {operation}")
            answer: Answer = self._control.recv()
        except (EOFError, OSError) as error:
            why = self._dead(1.0) or "the server of the ranks is gone"
            raise PoolError(f"{why} during {operation}") from error
        return answer._replace(dead=dead or answer.dead)

    def _dead(self, patience: float = 0.0) -> str:
        """How the server ended, in words; empty where it has not."""
        if self._process is None:
            return ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"the server of the ranks {died(self._process.wait(patience))}"
        return ""

    def _launch(self) -> None:
        self._control, theirs = Pipe()
        with theirs:
            self._folder = tempfile.mkdtemp(prefix="moetail-ranks-")
            arguments = [str(theirs.fileno()), str(self.size), self.device]
            arguments += [self._folder, " ".join(PRELOAD)]
            arguments += [entry for entry in sys.path if isinstance(entry, str)]
            # A session of its own: Ctrl-C reaches the parent alone, which then ends the ranks.
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**_environment(self.device), **self.environment, **os.environ},
                start_new_session=True,
            )

    def _end(self) -> None:
        """End the server, which first kills and reaps the ranks."""
        control, process = self._control, self._process
        self._control, self._process, self._pids = None, None, ()
        if control is not None:
            control.close()
        if process is not None:
            try:
                process.wait(_ENDING)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        # The server has done this, unless it was killed.
        shutil.rmtree(self._folder, ignore_errors=True)


_POOLS: weakref.WeakSet[RankPool] = weakref.WeakSet()


def _abandon() -> None:
    """In a forked copy of the parent: the processes are the parent's, and end with it."""
    for pool in list(_POOLS):
        if pool._process is not None:
            pool._process.returncode = 0  # not this process's child, so nothing to wait for
        pool._lock, pool._process, pool._folder = threading.RLock(), None, ""
        pool._end()


os.register_at_fork(after_in_child=_abandon)


def _environment(device: str) -> dict[str, str]:
    """Defaults for the ranks; what the user has set stays."""
    settings = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if device == "cuda":
        return settings | {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
    # Without this, gloo resolves the host's name, which need not lead anywhere.
    with contextlib.suppress(OSError):
        for name in {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}:
            settings["GLOO_SOCKET_IFNAME"] = name
    return settings
