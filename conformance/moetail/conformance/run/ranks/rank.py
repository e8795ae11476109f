"""A rank's process: it does what the server asks, one request after the other."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe
from multiprocessing.context import ForkProcess
from typing import Any

import torch
import torch.distributed as dist

from moetail.conformance.run.ranks.messages import BEGUN, Outcome, RankFailure, Where, dumps

__all__ = ["Rank", "end_with_parent"]


class Rank(ForkProcess):
    """The process of a rank: its main thread works, another one listens.

    A request is a pickled pair: a number of ranks, and a function with its arguments, pickled
    again, for the group of so many; or None, to make that group. An empty one asks where it is.

    Args:
        number, size, device: its rank, and the pool's size and device.
        store: the file by which the ranks find each other.
        others: connections of the server, which the process must not keep open.
    """

    def __init__(
        self, number: int, size: int, device: str, store: str, others: list[Connection]
    ) -> None:
        super().__init__()
        self.number, self.size, self.device, self.store = number, size, device, store
        self.servers_end, self.end = Pipe()
        self.others = [*others, self.servers_end]

    def run(self) -> None:
        os.setpgid(0, 0)  # what it starts ends with it
        end_with_parent()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for connection in self.others:
            connection.close()
        self.groups: dict[int, dist.ProcessGroup] = {}
        self.group: Any = None  # of the call under way
        self.requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.sending = threading.Lock()
        self.main = threading.get_ident()
        threading.Thread(target=self.listen, daemon=True).start()
        while True:
            self.answer(*pickle.loads(self.requests.get()))

    def answer(self, ranks: int, call: bytes | None) -> None:
        self.group, value, failure, usable = None, None, None, True
        try:
            value = self.make_group(ranks) if call is None else self.call(ranks, call)
        except BaseException as error:
            failure = _failure(error)
            try:
                if self.device == "cuda":
                    torch.cuda.synchronize()
            except Exception:
                usable = False  # an error that stays with the context
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        collectives = self.collectives() if usable else None
        self.send(pickle.dumps(Outcome(self.number, value, failure, collectives)))

    def call(self, ranks: int, call: bytes) -> bytes:
        function, args = pickle.loads(call)
        self.group = self.groups[ranks]
        self.send(BEGUN)  # from here on, what happens is the function's doing
        value = function(self.group, self.number, *args)
        if self.device == "cuda":
            # What is still under way belongs to this call: its errors, and collectives that hang.
            torch.cuda.synchronize()
        return dumps(value)

    def make_group(self, ranks: int) -> bytes:
        """Meet all ranks of the pool, or make a group of the first few."""
        self.send(BEGUN)
        if ranks == self.size:
            torch.set_num_threads(1)
            options: dict[str, Any] = {"backend": "gloo"}
            if self.device == "cuda":
                if self.number >= (found := torch.cuda.device_count()):
                    raise RuntimeError(f"{self.size} ranks need as many GPUs, not {found}")
                torch.cuda.set_device(self.number)
                options = {"backend": "nccl", "device_id": torch.device("cuda", self.number)}
            # The pool's own limits must come first, so that it can say which rank is at fault.
            options |= {"timeout": timedelta(days=1), "rank": self.number, "world_size": ranks}
            store = dist.FileStore(self.store, ranks)  # type: ignore[attr-defined]
            dist.init_process_group(store=store, **options)
        group = dist.group.WORLD if ranks == self.size else dist.new_group(list(range(ranks)))
        if self.number < ranks:
            assert isinstance(group, dist.ProcessGroup)
            self.groups[ranks] = group
        return b""

    def listen(self) -> None:
        """Pass on requests, and say where the main thread is when asked; end with the server."""
        try:
            while True:
                if request := self.end.recv_bytes():
                    self.requests.put(request)
                else:
                    self.send(pickle.dumps(self.where()))
        finally:
            os._exit(1)

    def where(self) -> Where:
        frame = sys._current_frames()[self.main]
        name = frame.f_code.co_filename.replace(os.sep, "/")
        waiting = "/torch/distributed/" in name or "/torch/cuda/" in name
        stack = traceback.extract_stack(frame)
        while len(stack) > 1 and any(entry.filename == __file__ for entry in stack):
            del stack[0]  # the pool's own frames say nothing
        return Where(self.collectives(), waiting, "".join(traceback.format_list(stack)))

    def collectives(self) -> int:
        return 0 if self.group is None else int(self.group._get_sequence_number_for_group())

    def send(self, message: bytes) -> None:
        with self.sending:
            self.end.send_bytes(message)


def _failure(error: BaseException) -> RankFailure:
    message, pickled = "(its message cannot be read)", b""
    with contextlib.suppress(Exception):
        message = str(error)
    with contextlib.suppress(Exception):
        pickled = dumps(error)
    trace = error.__traceback__
    while trace is not None and trace.tb_next and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(error.with_traceback(trace)))
    return RankFailure(type(error).__qualname__, message, text, pickled)


def end_with_parent() -> None:
    """Have the kernel end this process, one of multiprocessing's, with its parent (on Linux)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)  # it ended before that
