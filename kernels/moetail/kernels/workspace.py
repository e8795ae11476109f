"""What the ranks of a group share (operation 7): buffers that all of them can write.

The exchange itself is explained in ``csrc/exchange.cuh``. A workspace keeps, on each rank, two
slots of ``max(2 * max_tokens, world_size)`` rows, which is what "twoshot" needs: 470 MB at
H = 7168 and 8192 tokens.

One workspace serves one stream of calls: the ranks make the same calls in the same order, and a
call follows the one before it on the stream (or by an event). Calls of two workspaces must not run
at the same time on a GPU: as with NCCL, two kernels that wait for peers may keep each other out.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moetail.kernels.operators import kernels_on
from moetail.spec import ContractError, Workspace
from moetail.spec.checks import HIDDEN_MULTIPLE, MAX_HIDDEN, MIN_HIDDEN, check_workspace_request

__all__ = ["BeamAllReduceWorkspace", "ExchangeError", "default_strategy"]

MAX_RANKS = 8
# As in exchange.cuh: what an empty word holds, and the bytes behind the slots for the headers.
_EMPTY = -1
_HEADER_BYTES = 2 * MAX_RANKS * 8
_OTHER_WIDTH = 2048
_CALLS = ("oneshot gather", "twoshot gather", "all-reduce", "?")

_log = logging.getLogger(__name__)


class ExchangeError(RuntimeError):
    """A rank did not arrive in a call, or made another one. The workspace is of no use any more.

    Attributes:
        rank: the rank that did not arrive.
        call: the number of the call, counted from 0 over the workspace's life.
    """

    def __init__(self, rank: int, call: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.call = call

    def __reduce__(self) -> tuple[type[ExchangeError], tuple[int, int, str]]:
        return type(self), (self.rank, self.call, str(self))


def _shown(signature: int) -> str:
    """A call's signature in words; see ``signature_of`` in exchange.h."""
    norm = " with the next norm" if signature >> 29 & 1 else ""
    return f"{_CALLS[signature >> 30 & 3]} of {signature & 0x1FFFFFFF} tokens{norm}"


@dataclass(eq=False)
class Buffers:
    """One rank's share of an exchange, as the kernels take it.

    Attributes:
        device: the GPU of this rank.
        own: the symmetric buffer of this rank.
        addresses: int64 ``[W]`` on the CPU, where this rank finds each rank's buffer.
        width: elements of a row of a slot; H, if the kernels take rows of H.
        slot_rows: rows of a slot.
        share: how many ranks are on this GPU.
        handle: keeps the peers' mappings.
        state: the call counter, on the device.
        report: what went wrong, in host memory that the device writes.
        given: of these, what every kernel takes, converted once.
    """

    device: torch.device
    own: Tensor
    addresses: Tensor
    width: int
    slot_rows: int
    share: int
    handle: Any = None
    state: Tensor = field(init=False)
    report: Tensor = field(init=False)
    given: tuple[Any, ...] = field(init=False)

    def __post_init__(self) -> None:
        import tvm_ffi  # not above: what needs no GPU needs none of it

        self.state = torch.zeros(2, dtype=torch.int64, device=self.device)
        self.report = torch.zeros(5, dtype=torch.int64).pin_memory()
        tensors = (self.addresses, self.state, self.report)
        addresses, state, report = (tvm_ffi.from_dlpack(tensor) for tensor in tensors)
        self.given = (addresses, self.width, self.slot_rows, state, report, self.share)

    def clear(self) -> None:
        """Every word empty, no header."""
        self.own.fill_(_EMPTY)
        self.own[-_HEADER_BYTES // 4 :].zero_()


def _shape(hidden_size: int, max_tokens: int, world_size: int) -> tuple[int, int]:
    """Width and number of a slot's rows."""
    width = hidden_size
    if not MIN_HIDDEN <= width <= MAX_HIDDEN or width % HIDDEN_MULTIPLE:
        width = _OTHER_WIDTH
    return width, max(2 * -(-max_tokens * hidden_size // width), world_size)


def _words(width: int, slot_rows: int) -> int:
    return (2 * slot_rows * width * 2 + _HEADER_BYTES) // 4


def _too_many(world_size: int) -> str | None:
    return f"{world_size} ranks; supported: up to {MAX_RANKS}" if world_size > MAX_RANKS else None


@dataclass(eq=False)
class BeamAllReduceWorkspace:
    """A workspace; the fields are those of :class:`moetail.spec.Workspace` and may be assigned.

    Over a CPU group it holds no buffers: on CPU tensors the reference runs.

    The thresholds are measured on two H200s, H = 7168, K = 8, T from 1 to 8192
    (``conformance/results/bench-distributed-2x-nvidia-h200.json``): "oneshot" is the fastest at
    every T. Without multicast, "twoshot" sends two rows where "oneshot" sends one, and links are
    slower than memory. With another link it may pay, so both thresholds can be assigned.

    For four and eight ranks they are an estimate from that: of T tokens on W ranks, "twoshot"
    spares a rank T * (W - 1) / W rows of the residual, and sends and receives as many rows more
    than "oneshot", each of which is written, read and emptied. That is a loss for every W.

    Attributes:
        deadline_s: how long a kernel waits for a rank before it gives up, in seconds. A graph
            keeps the value it was captured with.
    """

    world_size: int
    rank: int
    hidden_size: int
    max_tokens: int
    device_group: dist.ProcessGroup | None
    all_gather: Callable[..., Any] | None = None
    moe_gather_oneshot_max_tokens: int = 2**29 - 1  # the most tokens of any call
    moe_gather_separate_norm_min_tokens: int | None = None
    deadline_s: float = 30.0
    buffers: Buffers | None = field(default=None, repr=False)

    _reason = None

    @classmethod
    def create(
        cls,
        group: dist.ProcessGroup | None,
        hidden_size: int,
        max_tokens: int,
        dtype: torch.dtype,
    ) -> BeamAllReduceWorkspace | None:
        """See :meth:`moetail.spec.api.WorkspaceFactory.create`; group None is the default group.

        On the current CUDA device, if the group is one of NCCL. Builds the kernels if need be.

        Raises:
            ContractError: a size that no workspace can have, or sizes or dtypes that differ between
                the ranks, on all ranks alike (DOMAIN-1).
            BuildError: the kernels cannot be built on some rank; on all ranks alike.
        """
        cls._reason = None
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if group is None or dist.get_rank(group) < 0:
            check_workspace_request(hidden_size, max_tokens)
            return cls._refused("there is no process group, or this process is not in it")
        # Agreement comes before any refusal: the other ranks cannot know what this one must refuse,
        # and would wait for it.
        requests = _gathered(group, (hidden_size, max_tokens, str(dtype)))
        if any(request != requests[0] for request in requests):
            raise ContractError(
                "DOMAIN-1",
                "hidden_size, max_tokens, dtype",
                f"{requests} on ranks 0 to {len(requests) - 1}",
                "the same on every rank",
            )
        check_workspace_request(hidden_size, max_tokens)
        if dtype is not torch.bfloat16:
            return cls._refused(f"{dtype}; supported: torch.bfloat16")
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        workspace = cls(world_size, rank, hidden_size, max_tokens, group)
        if "nccl" not in str(dist.get_backend_config(group)):
            return workspace  # a CPU group
        reason = _too_many(world_size) or _unsupported_group(group)
        if reason is not None:
            return cls._refused(reason)
        made = _symmetric_buffers(group, hidden_size, max_tokens)
        if isinstance(made, str):
            return cls._refused(made)
        workspace.buffers = made
        return workspace

    @classmethod
    def why_unsupported(cls) -> str | None:
        """Why the last :meth:`create` of this process returned None; None if it did not."""
        return cls._reason

    @classmethod
    def _refused(cls, reason: str) -> None:
        cls._reason = reason
        _log.info("no workspace: %s", reason)

    @classmethod
    def virtual(
        cls,
        world_size: int,
        hidden_size: int,
        max_tokens: int,
        device: torch.device | str | int | None = None,
    ) -> list[BeamAllReduceWorkspace]:
        """The workspaces of ``world_size`` ranks that all live on one GPU, for tests.

        Each rank's calls go to a stream of its own, since the kernels of all ranks must run at the
        same time: no call may wait on the host, or on a stream, for another rank's. Grids are
        small enough for that, if nothing else keeps the GPU busy for good. A kernel's first launch
        may wait for the GPU to be idle: set CUDA_MODULE_LOADING=EAGER before CUDA starts; and
        streams that share a connection to the GPU wait for each other: set
        CUDA_DEVICE_MAX_CONNECTIONS=32, too, for eight ranks.
        "unfused" gathers through the exchange, as there is no process group.
        """
        check_workspace_request(hidden_size, max_tokens)
        if not 1 <= world_size <= MAX_RANKS:
            raise ContractError("DOMAIN-1", "world_size", str(world_size), f"1 to {MAX_RANKS}")
        home = torch.device("cuda", torch.cuda.current_device())
        if device is not None:
            home = torch.empty(0, device=device).device
        width, rows = _shape(hidden_size, max_tokens, world_size)
        own = [
            torch.empty(_words(width, rows), dtype=torch.int32, device=home)
            for _ in range(world_size)
        ]
        addresses = torch.tensor([tensor.data_ptr() for tensor in own], dtype=torch.int64)
        kernels_on(home)
        workspaces = []
        for rank in range(world_size):
            buffers = Buffers(home, own[rank], addresses, width, rows, world_size, own)
            buffers.clear()
            workspace = cls(world_size, rank, hidden_size, max_tokens, None, buffers=buffers)
            workspace.all_gather = workspace.gather_rows
            workspaces.append(workspace)
        torch.cuda.synchronize(home)
        return workspaces

    def check(self) -> None:
        """Wait for the device and raise if a rank did not arrive in any call so far.

        Raises:
            ExchangeError: it names the rank.
        """
        if self.buffers is not None:
            torch.cuda.synchronize(self.buffers.device)
        self.raise_if_lost()

    def raise_if_lost(self) -> None:
        """What is known now, without waiting for the device; every call begins with this."""
        if self.buffers is None:
            return
        code, rank, call, mine, other = self.buffers.report.tolist()
        if code == 0:
            return
        fault = (
            f"did not arrive within the deadline: this rank called {_shown(mine)}"
            if code == 1
            else f"called {_shown(other)} where this rank called {_shown(mine)}"
        )
        raise ExchangeError(
            rank,
            call,
            f"rank {rank} {fault}, in call {call} of the workspace of rank {self.rank} of "
            f"{self.world_size}. What that call returned is not valid, and the workspace cannot be "
            "used any more: create another one on all ranks.",
        )

    def gather_rows(self, output: Tensor, source: Tensor, group: Any = None) -> None:
        """An all-gather of BF16 rows ``[L, H]`` through the exchange, one for ``all_gather``."""
        self.launch(
            "gather",
            output,
            None,
            (False, source, None, 1.0),
            (None, None, None, 1.0, 1.0, None, 0.0),
        )

    def launch(
        self,
        kernel: str,
        hidden: Tensor,
        normalized: Tensor | None,
        source: tuple[Any, ...],
        boundary: tuple[Any, ...],
    ) -> None:
        """Start a kernel of the exchange on the current stream."""
        buffers = self.buffers
        assert buffers is not None
        getattr(kernels_on(buffers.device), kernel)(
            *source,
            *boundary,
            hidden,
            normalized,
            self.rank,
            float(self.deadline_s),
            *buffers.given,
            True,  # programmatic dependent launch
        )


def default_strategy(num_tokens: int, workspace: Workspace) -> str:
    """What strategy None means (OWN-4)."""
    if num_tokens <= workspace.moe_gather_oneshot_max_tokens:
        return "oneshot"
    separate = workspace.moe_gather_separate_norm_min_tokens
    return "unfused" if separate is not None and num_tokens >= separate else "twoshot"


def _gathered(group: dist.ProcessGroup, value: Any) -> list[Any]:
    """Each rank's value, on every rank."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _unsupported_group(group: dist.ProcessGroup) -> str | None:
    """Why the ranks of an NCCL group cannot write each other's memory; the same on every rank."""
    index = torch.cuda.current_device()
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    places = _gathered(group, (socket.gethostname(), uuid))
    hosts, uuids = ({place[i] for place in places} for i in (0, 1))
    if len(hosts) > 1:
        return f"ranks on several hosts: {', '.join(sorted(hosts))}"
    if len(uuids) < len(places):
        return "several ranks on one GPU; BeamAllReduceWorkspace.virtual is for that"
    visible = {
        str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())
    }
    reasons = [
        f"rank {dist.get_rank(group)}'s GPU has no peer access to rank {rank}'s"
        for rank, (_, other) in enumerate(places)
        if other in visible
        and visible[other] != index
        and not torch.cuda.can_device_access_peer(index, visible[other])
    ]
    found = _gathered(group, reasons[0] if reasons else None)
    return next((reason for reason in found if reason is not None), None)


def _symmetric_buffers(
    group: dist.ProcessGroup, hidden_size: int, max_tokens: int
) -> Buffers | str:
    """This rank's buffers, or why some rank has none. All ranks take the same steps."""
    from moetail.kernels.build import BuildError  # not above: build is a command too

    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    device = torch.device("cuda", torch.cuda.current_device())

    def agreed(step: Callable[[], Any]) -> str | None:
        failure: Exception | None = None
        try:
            step()
            torch.cuda.synchronize(device)
        except Exception as error:
            failure = error
        message = None if failure is None else f"rank {rank}: {type(failure).__name__}: {failure}"
        found = _gathered(group, (message, isinstance(failure, BuildError)))
        for text, is_build in found:
            if text is not None and is_build:
                raise BuildError(text) from failure
        return next((text for text, _ in found if text is not None), None)

    width, slot_rows = _shape(hidden_size, max_tokens, world_size)
    words = _words(width, slot_rows)
    own: list[Tensor] = []
    made: list[Buffers] = []

    def allocate() -> None:
        if world_size == 1:
            own.append(torch.empty(words, dtype=torch.int32, device=device))
            return
        import torch.distributed._symmetric_memory as symmetric

        own.append(symmetric.empty(words, dtype=torch.int32, device=device))

    def connect() -> None:
        if world_size == 1:
            handle, pointers = None, [own[0].data_ptr()]
        else:
            import torch.distributed._symmetric_memory as symmetric

            handle = symmetric.rendezvous(own[0], group)
            offset = own[0].data_ptr() - handle.buffer_ptrs[rank]
            pointers = [pointer + offset for pointer in handle.buffer_ptrs]
        addresses = torch.tensor(pointers, dtype=torch.int64)
        made.append(Buffers(device, own[0], addresses, width, slot_rows, 1, handle))
        made[0].clear()

    # Rank 0 builds for all: the others find the library in the cache.
    reason = agreed(lambda: kernels_on(device) if rank == 0 else None)
    reason = reason or agreed(lambda: kernels_on(device))
    reason = reason or agreed(allocate) or agreed(connect)
    return made[0] if reason is None else reason
