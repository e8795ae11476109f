"""A pool of rank processes, started once and reused for every distributed case.

Importing torch in every rank costs more than the cases, so a pool has one *server* process, which
imports everything once and does nothing but fork; the ranks are its children::

    parent ── control socket ──> server ── fork ──> rank 0 .. size - 1
       └───── one call socket and one watch socket per rank ─────┘

What outlives what does not rest on anybody's good behaviour. The server waits on its control socket
and ends, ranks first, when the parent's end closes, whatever closed it; the kernel kills a rank
whose server is gone; and a thread in each rank waits on its watch socket, which the parent holds.

The server is no ``multiprocessing`` fork server, because that one imports the caller's ``__main__``
again in each child, is shared with whatever else the caller runs, and outlives the pool.

Ranks find each other through a file in a temporary directory and, on the CPU, talk over the
loopback interface, so that pools side by side never meet.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import itertools
import json
import os
import pickle
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from moetail.spec import ContractError

__all__ = ["Outcome", "RankError", "RankFailure", "RankPool", "end_with_parent"]

PRELOAD: tuple[str, ...] = (
    "torch.distributed",
    "moetail.reference",
    "moetail.conformance.cases",
    "moetail.conformance.judge",
    "moetail.conformance.run.call",
    "moetail.conformance.run.virtual",
    "moetail.conformance.catalogue",
    "moetail.conformance.catalogue.variants",
)
"""What the server imports before it forks, as far as it is there: only a matter of speed."""

_START_TIMEOUT = 180.0
_SERVER_TIMEOUT = 10.0
_WATCH_TIMEOUT = 5.0
# Our own limits must come first, so that the pool can say which rank is at fault.
_COLLECTIVE_TIMEOUT = timedelta(days=1)
_BOOTSTRAP = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from moetail.conformance.run.ranks import _serve; _serve(int(sys.argv[1]), sys.argv[2])"
)


# What a caller sees


@dataclass(frozen=True)
class RankFailure:
    """What a rank raised.

    Attributes:
        type: name of the exception's class.
        message: ``str()`` of the exception.
        rule: id of the rule, where it is a :class:`moetail.spec.ContractError`.
        traceback: the rank's traceback as text.
        exception: the exception itself, without its traceback; None where it cannot be pickled.
    """

    type: str
    message: str
    rule: str | None = None
    traceback: str = field(default="", repr=False)
    exception: BaseException | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: with ``value``, unless ``error`` is there."""

    rank: int
    value: Any = None
    error: RankFailure | None = None


class RankError(RuntimeError):
    """A rank left the others waiting, or died. The pool that raised it has been stopped.

    Attributes:
        ranks: those at fault.
        operation: what ran.
        reason: what they did, without their names and the operation's.
        details: for each rank that raised or hangs, its stack as text.
    """

    def __init__(
        self,
        message: str,
        ranks: Sequence[int] = (),
        operation: str = "",
        reason: str = "",
        details: str = "",
    ) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.operation = operation
        self.reason = reason
        self.details = details

    def __reduce__(self) -> tuple[type[RankError], tuple[str, tuple[int, ...], str, str, str]]:
        return type(self), (str(self), self.ranks, self.operation, self.reason, self.details)


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
        self._server = _Server(device, environment or {})
        self._last = "the start of the rank pool"
        self._closed = False
        # Runs when the pool is collected and when the interpreter exits, whichever comes first.
        self._finalizer = weakref.finalize(self, self._server.close)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids in rank order; empty while the pool is not running."""
        return self._server.pids

    def close(self) -> None:
        """End every process of the pool, at once, a running call's included."""
        self._closed = True
        self._server.kill()
        with self._server.lock:
            self._finalizer()

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
            others returned, or they took part in different numbers of collectives, the pool is
            restarted before the next call, since a collective may be half done.

        Raises:
            RankError: some ranks raised while others hang, or a rank died or did not finish in
                time. The pool has been stopped; the next call starts it afresh.
        """
        if not 1 <= ranks <= self.size:
            raise ValueError(f"{operation}: {ranks} ranks, but the pool has 1 to {self.size}")
        call = pickle.dumps(("call", ranks, _dumps((function, args))))
        limit = self.timeout if timeout is None else timeout
        with self._server.lock:
            if self._closed:
                raise RuntimeError("the rank pool is closed")
            try:
                self._ensure(ranks)
                self._last = operation
                replies = self._call(range(ranks), call, operation, limit, self.grace)
                if not _clean(replies):
                    self._server.stop()
            except BaseException:
                self._server.stop()
                if self._closed:
                    raise RuntimeError(f"the rank pool was closed during {operation}") from None
                raise
        return [_outcome(rank, reply) for rank, reply in enumerate(replies)]

    def _ensure(self, ranks: int) -> None:
        """The processes, and the group of ``ranks`` ranks."""
        if died := self._server.ended():
            warnings.warn(
                f"{died} after {self._last}; the pool starts again", RuntimeWarning, stacklevel=3
            )
            self._server.stop()
        everyone = range(self.size)
        if not self._server.pids:
            self._server.start(self.size)
            self._collective(everyone, None, "the start of the rank pool")
        if ranks not in self._server.groups:
            message = pickle.dumps(("group", ranks, b""))
            self._collective(everyone, message, f"making a group of {ranks} ranks")
            self._server.groups.add(ranks)

    def _collective(self, ranks: range, message: bytes | None, what: str) -> None:
        """A step of the pool's own, which no rank may fail."""
        replies = self._call(ranks, message, what, _START_TIMEOUT, self.grace)
        failures = {rank: r.failure for rank, r in enumerate(replies) if r.failure is not None}
        if failures:
            raise _raised(failures, what, len(ranks))

    def _call(
        self, ranks: range, message: bytes | None, operation: str, limit: float, grace: float
    ) -> list[_Reply]:
        channels = self._server.calls
        deadline = time.monotonic() + limit
        end = deadline
        pending = set(ranks)
        replies: dict[int, _Reply] = {}
        lost: set[int] = set()
        with selectors.DefaultSelector() as selector:
            for rank in ranks:
                if message is not None:
                    try:
                        _send(channels[rank], message, deadline)
                    except TimeoutError:
                        break
                    except OSError:
                        pending.discard(rank)
                        lost.add(rank)
                        end = min(deadline, time.monotonic() + grace)
                        continue
                selector.register(channels[rank], selectors.EVENT_READ, rank)
            while pending and (wait := end - time.monotonic()) > 0:
                for key, _ in selector.select(wait):
                    rank = key.data
                    try:
                        reply: _Reply = pickle.loads(_receive(channels[rank], end))
                    except TimeoutError:
                        break
                    except (EOFError, OSError):
                        lost.add(rank)
                    else:
                        replies[rank] = reply
                    selector.unregister(key.fileobj)
                    pending.discard(rank)
                    if end == deadline and (rank in lost or reply.failure is not None):
                        end = min(deadline, time.monotonic() + grace)
        if not pending and not lost:
            return [replies[rank] for rank in ranks]
        failures = {rank: r.failure for rank, r in sorted(replies.items()) if r.failure is not None}
        if lost:
            raise self._died(sorted(lost), failures, operation, len(ranks))
        if failures:
            raise _raised(failures, operation, len(ranks))
        raise self._missing(sorted(pending), replies, operation, limit)

    def _died(
        self, lost: list[int], failures: dict[int, _Failure], operation: str, ranks: int
    ) -> RankError:
        # What the others raised since then comes from the lost connection.
        codes = [_exit(self._server.exit_code(rank)) for rank in lost]
        if len(set(codes)) == 1:
            reason = f"died ({codes[0]})"
            message = f"{_names(lost)} {reason}"
        else:
            reason = "died (" + ", ".join(codes) + ")"
            message = "; ".join(
                f"rank {rank} died ({code})" for rank, code in zip(lost, codes, strict=True)
            )
        return RankError(
            f"{message} in {operation} ({_count(ranks)})",
            lost,
            operation,
            reason,
            "\n".join(f"rank {rank}:\n{failure.traceback}" for rank, failure in failures.items()),
        )

    def _missing(
        self, pending: list[int], replies: dict[int, _Reply], operation: str, limit: float
    ) -> RankError:
        """Which ranks are at fault, when some did not finish and none failed."""
        states = self._server.watch(pending)
        sequences = {rank: state.sequence for rank, state in states.items()}
        sequences.update((rank, reply.sequence) for rank, reply in replies.items())
        front = max(sequences.values(), default=0)
        # A rank that does not even say where it is holds the interpreter, outside any collective.
        late = [
            rank
            for rank in sorted({*pending, *replies})
            if rank not in sequences or sequences[rank] < front
        ]
        if not late:
            late = [rank for rank in pending if not states[rank].waiting]
        waiting = [rank for rank in pending if rank not in late]
        within = f"within {limit:g} s"
        if late and waiting:
            returned = [rank for rank in late if rank in replies]
            which = f" ({_names(returned)} had returned)" if returned else ""
            them = "it" if len(late) == 1 else "them"
            rest = f"{_names(waiting)} {_verb('wait', waiting)} for {them}"
            reason = f"did not arrive {within}{which}; {rest}"
            message = f"{_names(late)} did not arrive in {operation} {within}{which}; {rest}"
        else:
            late = pending
            reason = f"did not finish {within}"
            message = f"{_names(late)} did not finish {operation} {within}"
        details = "\n".join(
            f"rank {rank}:\n{states[rank].stack if rank in states else '  gives no sign of life'}"
            for rank in pending
        )
        return RankError(message, late, operation, reason, details)


def _clean(replies: list[_Reply]) -> bool:
    """Whether the group is fit for another call."""
    return (
        all(reply.usable for reply in replies)
        and len({reply.sequence for reply in replies}) == 1
        and len({reply.failure is None for reply in replies}) == 1
    )


def _outcome(rank: int, reply: _Reply) -> Outcome:
    failure = reply.failure
    if failure is None:
        return Outcome(rank, value=pickle.loads(reply.value))
    exception = None
    if failure.exception is not None:
        # An exception whose arguments are not its constructor's pickles, but does not unpickle.
        with contextlib.suppress(Exception):
            exception = pickle.loads(failure.exception)
    return Outcome(
        rank,
        error=RankFailure(
            failure.type,
            failure.message,
            failure.rule,
            failure.traceback,
            exception if isinstance(exception, BaseException) else None,
        ),
    )


def _raised(failures: dict[int, _Failure], operation: str, ranks: int) -> RankError:
    texts = {rank: f"{f.type}: {f.message}" for rank, f in failures.items()}
    if len(set(texts.values())) == 1:
        reason = f"raised {next(iter(texts.values()))}"
        message = f"{_names(failures)} {reason}"
    else:
        message = "; ".join(f"rank {rank} raised {text}" for rank, text in texts.items())
        reason = message
    return RankError(
        f"{message} in {operation} ({_count(ranks)})",
        tuple(failures),
        operation,
        reason,
        "\n".join(f"rank {rank}:\n{failure.traceback}" for rank, failure in failures.items()),
    )


def _names(ranks: Iterable[int]) -> str:
    ranks = list(ranks)
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def _count(ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks != 1)}"


def _verb(verb: str, ranks: list[int]) -> str:
    return verb if len(ranks) != 1 else f"{verb}s"


def _exit(code: int | None) -> str:
    return "exit code unknown" if code is None else f"exit code {code}"


# Messages


@dataclass(frozen=True)
class _Failure:
    type: str
    message: str
    rule: str | None
    traceback: str
    exception: bytes | None


@dataclass(frozen=True)
class _Reply:
    """A rank's answer to one message; ``sequence`` counts the collectives it took part in."""

    value: bytes = b""
    failure: _Failure | None = None
    sequence: int = 0
    usable: bool = True


@dataclass(frozen=True)
class _State:
    """Where a rank is that has not answered."""

    sequence: int
    waiting: bool
    stack: str


_LENGTH = struct.Struct("!Q")


def _send(channel: socket.socket, data: bytes, deadline: float | None = None) -> None:
    if deadline is not None:
        channel.settimeout(max(deadline - time.monotonic(), 1e-3))
    channel.sendall(_LENGTH.pack(len(data)))
    channel.sendall(data)


def _receive(channel: socket.socket, deadline: float | None = None) -> bytearray:
    (length,) = _LENGTH.unpack(_exactly(channel, _LENGTH.size, deadline))
    return _exactly(channel, length, deadline)


def _exactly(channel: socket.socket, count: int, deadline: float | None) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        if deadline is not None:
            channel.settimeout(max(deadline - time.monotonic(), 1e-3))
        received = channel.recv_into(view)
        if not received:
            raise EOFError
        view = view[received:]
    return data


class _Pickler(pickle.Pickler):
    """Sends tensors as bytes: torch's own reducers would share file descriptors, or the GPU."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.layout is torch.strided and not obj.is_quantized:
            tensor = obj.detach()
            shape, strides = tuple(tensor.shape), tensor.stride()
            if tensor.is_meta:
                return _meta_tensor, (tensor.dtype, shape, strides)
            tensor = tensor.resolve_conj().resolve_neg()
            if not tensor.is_contiguous():
                # The elements that the strides reach, gaps between them included.
                strides = tensor.stride()
                reach = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
                tensor = tensor.as_strided((reach if tensor.numel() else 0,), (1,))
            data = tensor.cpu().reshape(-1).view(torch.uint8).numpy()
            return _tensor, (bytearray(data), tensor.dtype, shape, strides)
        return NotImplemented


def _tensor(
    data: bytearray, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.as_strided(shape, strides)


def _meta_tensor(
    dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


# The parent's side of the server


class _Server:
    """The server process, started when it is needed, and the sockets of its ranks."""

    def __init__(self, device: str, environment: Mapping[str, str]) -> None:
        self.device = device
        self.environment = environment
        self.lock = threading.RLock()
        self.pids: tuple[int, ...] = ()
        self.calls: list[socket.socket] = []
        self.watches: list[socket.socket] = []
        self.groups: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._directory: str | None = None
        _servers.add(self)

    def start(self, size: int) -> None:
        """Fork the ranks. Each says on its call socket when it is ready."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._launch()
        theirs: list[socket.socket] = []
        try:
            for mine in (self.calls, self.watches):
                for _ in range(size):
                    here, there = socket.socketpair()
                    mine.append(here)
                    theirs.append(there)
            answer = self._ask(
                {
                    "do": "start",
                    "size": size,
                    "device": self.device,
                    "path": _path(),
                    "preload": PRELOAD,
                },
                [end.fileno() for end in theirs],
                timeout=_START_TIMEOUT,
            )
        finally:
            for end in theirs:
                end.close()
        if answer is None or "pids" not in answer:
            why = "it gave no answer" if answer is None else answer["error"]
            raise RankError(
                f"the rank pool did not start: {why}", (), "the start of the rank pool", why
            )
        self.pids = tuple(answer["pids"])

    def ended(self) -> str:
        """What has died since the last call, in words."""
        if not self.pids or self._process is None:
            return ""
        if (code := self._process.poll()) is not None:
            return f"the server of the ranks died ({_exit(code)})"
        with selectors.DefaultSelector() as selector:
            for rank, channel in enumerate(self.calls):
                selector.register(channel, selectors.EVENT_READ, rank)
            # An idle rank's socket is readable only at its end.
            gone = sorted(key.data for key, _ in selector.select(0))
        return "; ".join(f"rank {rank} died ({_exit(self.exit_code(rank))})" for rank in gone)

    def exit_code(self, rank: int) -> int | None:
        answer = self._ask({"do": "exit", "rank": rank})
        return None if answer is None else answer["code"]

    def watch(self, ranks: list[int]) -> dict[int, _State]:
        """Where ``ranks`` are; without those that do not say."""
        states: dict[int, _State] = {}
        deadline = time.monotonic() + _WATCH_TIMEOUT
        with contextlib.suppress(OSError):
            for rank in ranks:
                _send(self.watches[rank], b"", deadline)
        for rank in ranks:
            with contextlib.suppress(OSError, EOFError):
                states[rank] = pickle.loads(_receive(self.watches[rank], deadline))
        return states

    def stop(self) -> None:
        """End the ranks; the server stays, so that the next ones start sooner."""
        if self.pids and self._ask({"do": "stop"}) is None:
            self.close()
        self._release()

    def kill(self) -> None:
        """End every process, whatever other threads do here; what is left is for close()."""
        control = self._control
        if control is not None:
            with contextlib.suppress(OSError):
                control.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End everything."""
        if self._control is not None:
            self._control.close()
            self._control = None
        process, self._process = self._process, None
        if process is not None:
            try:
                # It kills and reaps the ranks before it ends.
                process.wait(_SERVER_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._directory is not None:
            # The server has done this, unless it was killed.
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None
        self._release()

    def abandon(self) -> None:
        """In a forked copy of the parent: the processes are the parent's, and end with it."""
        self.lock = threading.RLock()
        if self._process is not None:
            self._process.returncode = 0  # not this process's child, so nothing to wait for
            self._process = None
        self._directory = None
        self.close()

    def _release(self) -> None:
        for channel in (*self.calls, *self.watches):
            channel.close()
        self.calls.clear()
        self.watches.clear()
        self.groups.clear()
        self.pids = ()

    def _launch(self) -> None:
        self._directory = tempfile.mkdtemp(prefix="moetail-ranks-")
        here, there = socket.socketpair()
        environment = dict(os.environ)
        for name, value in {**_environment(self.device), **self.environment}.items():
            environment.setdefault(name, value)
        with there:
            try:
                # A session of its own: Ctrl-C reaches the parent alone, which then ends the ranks.
                self._process = subprocess.Popen(
                    [
                        *(sys.executable, "-c", _BOOTSTRAP),
                        *(str(there.fileno()), self._directory, *_path()),
                    ],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[there.fileno()],
                    env=environment,
                    start_new_session=True,
                )
            except BaseException:
                here.close()
                raise
        self._control = here

    def _ask(
        self, request: dict[str, Any], fds: Sequence[int] = (), timeout: float = _SERVER_TIMEOUT
    ) -> dict[str, Any] | None:
        if self._control is None:
            return None
        deadline = time.monotonic() + timeout
        try:
            if fds:
                self._control.settimeout(timeout)
                socket.send_fds(self._control, [b"+"], fds)
            _send(self._control, json.dumps(request).encode(), deadline)
            answer: dict[str, Any] = json.loads(_receive(self._control, deadline))
        except (OSError, EOFError):
            return None
        return answer


_servers: weakref.WeakSet[_Server] = weakref.WeakSet()


def _abandon_all() -> None:
    for server in list(_servers):
        server.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)


def _path() -> list[str]:
    return [entry for entry in sys.path if isinstance(entry, str)]


def _environment(device: str) -> dict[str, str]:
    """Defaults for the ranks; what the user has set stays."""
    settings = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if device == "cuda":
        settings |= {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
    else:
        # Without this, gloo resolves the host's name, which need not lead anywhere.
        with contextlib.suppress(OSError):
            interfaces = {name for _, name in socket.if_nameindex()}
            for loopback in interfaces & {"lo", "lo0"}:
                settings["GLOO_SOCKET_IFNAME"] = loopback
    return settings


# The server's side


def _serve(control_fd: int, directory: str) -> None:
    """The server: start and end ranks as the parent asks, until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=control_fd)
    control.set_inheritable(False)
    pids: list[int] = []
    try:
        for generation in itertools.count():
            fds: list[int] = []
            if control.recv(1, socket.MSG_PEEK) == b"+":
                _, fds, _, _ = socket.recv_fds(control, 1, 512)
            request = json.loads(_receive(control))
            answer: dict[str, Any] = {}
            if request["do"] == "exit":
                answer = {"code": _exit_code(pids[request["rank"]])}
            else:
                _end(pids)
            if request["do"] == "start":
                store = os.path.join(directory, str(generation))
                answer = _start(request, fds, store, control, pids)
            _send(control, json.dumps(answer).encode())
    except (EOFError, OSError):
        pass  # the parent is gone
    finally:
        _end(pids)
        shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)  # taking the interpreter and torch down in order takes half a second


def _start(
    request: dict[str, Any], fds: list[int], store: str, control: socket.socket, pids: list[int]
) -> dict[str, Any]:
    try:
        sys.path[:] = request["path"]
        for module in request["preload"]:
            # Whoever needs it will say why it does not import.
            with contextlib.suppress(Exception):
                importlib.import_module(module)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return {"error": f"importing {', '.join(request['preload'])} initialized CUDA"}
        size = request["size"]
        server = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                try:
                    control.close()
                    for fd in fds:
                        if fd not in (fds[rank], fds[size + rank]):
                            os.close(fd)
                    call, watch = (socket.socket(fileno=fds[k]) for k in (rank, size + rank))
                    _rank(rank, size, request["device"], store, server, call, watch)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(1)
            pids.append(pid)
    finally:
        for fd in fds:
            os.close(fd)
    return {"pids": pids}


def _exit_code(pid: int, patience: float = 1.0) -> int | None:
    """The exit code of a rank that is about to end. It stays a zombie, so its id stays taken."""
    end = time.monotonic() + patience
    while hasattr(os, "waitid"):
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        if time.monotonic() > end:
            break
        time.sleep(0.005)
    return None


def _end(pids: list[int]) -> None:
    """Kill and reap the ranks and, since each leads a process group, what they have started."""
    for pid in pids:
        for kill in (os.killpg, os.kill):  # it may have had no time to become the leader
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    pids.clear()


# A rank's side


class _Rank:
    """What the main thread of a rank and its watching thread share."""

    def __init__(self) -> None:
        self.group: dist.ProcessGroup | None = None
        self.main = threading.get_ident()

    def sequence(self) -> int:
        if self.group is None:
            return 0
        return int(self.group._get_sequence_number_for_group())  # type: ignore[attr-defined]

    def watch(self, channel: socket.socket) -> NoReturn:
        """Say where the main thread is when asked; end with the parent."""
        try:
            while True:
                _receive(channel)
                frame = sys._current_frames()[self.main]
                name = frame.f_code.co_filename.replace(os.sep, "/")
                waiting = "/torch/distributed/" in name or "/torch/cuda/" in name
                stack = traceback.extract_stack(frame)
                while len(stack) > 1 and any(entry.filename == __file__ for entry in stack):
                    del stack[0]
                text = "".join(traceback.format_list(stack))
                _send(channel, pickle.dumps(_State(self.sequence(), waiting, text)))
        finally:
            os._exit(1)


def _rank(
    rank: int,
    size: int,
    device: str,
    store: str,
    server: int,
    call: socket.socket,
    watch: socket.socket,
) -> None:
    """A rank process: answer the parent's messages, one by one, until there is no parent."""
    os.setpgid(0, 0)
    end_with_parent(server)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for channel in (call, watch):
        channel.set_inheritable(False)
    state = _Rank()
    threading.Thread(target=state.watch, args=(watch,), daemon=True).start()
    groups: dict[int, dist.ProcessGroup] = {}

    def ready() -> bytes:
        torch.set_num_threads(1)
        options: dict[str, Any] = {"backend": "gloo"}
        if device == "cuda":
            if rank >= torch.cuda.device_count():
                raise RuntimeError(
                    f"{size} ranks need as many GPUs, not {torch.cuda.device_count()}"
                )
            torch.cuda.set_device(rank)
            options = {"backend": "nccl", "device_id": torch.device("cuda", rank)}
        dist.init_process_group(
            store=dist.FileStore(store, size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=size,
            timeout=_COLLECTIVE_TIMEOUT,
            **options,
        )
        return b""

    def group(ranks: int) -> bytes:
        new = dist.group.WORLD if ranks == size else dist.new_group(list(range(ranks)))
        if rank < ranks:
            assert isinstance(new, dist.ProcessGroup)
            groups[ranks] = new
        return b""

    def value(ranks: int, payload: bytes) -> bytes:
        function, args = pickle.loads(payload)
        result = function(groups[ranks], rank, *args)
        if device == "cuda":
            # What is still under way belongs to this call: its errors, and collectives that hang.
            torch.cuda.synchronize()
        return _dumps(result)

    def answer(step: Callable[[], bytes]) -> None:
        data, failure, usable = b"", None, True
        try:
            data = step()
        except BaseException as error:
            failure = _failure(error)
            if device == "cuda":
                try:
                    torch.cuda.synchronize()
                except Exception:
                    usable = False  # an error that stays with the context
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        _send(call, pickle.dumps(_Reply(data, failure, state.sequence(), usable)))

    answer(ready)
    while True:
        try:
            do, ranks, payload = pickle.loads(_receive(call))
        except (EOFError, OSError):
            os._exit(0)
        state.group = None
        if do == "group":
            answer(lambda ranks=ranks: group(ranks))  # type: ignore[misc]
        else:
            state.group = groups[ranks]
            answer(lambda ranks=ranks, payload=payload: value(ranks, payload))  # type: ignore[misc]


def _failure(error: BaseException) -> _Failure:
    exception = None
    with contextlib.suppress(Exception):
        exception = _dumps(error)
    try:
        message = str(error)
    except Exception:
        message = "(its message cannot be read)"
    # The pool's own frames say nothing.
    trace = error.__traceback__
    while trace is not None and trace.tb_next and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return _Failure(
        type(error).__qualname__,
        message,
        error.rule if isinstance(error, ContractError) else None,
        "".join(traceback.format_exception(error.with_traceback(trace))),
        exception,
    )


def end_with_parent(parent: int) -> None:
    """Have the kernel end this process with its parent, where it can (Linux)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)  # it ended before that
