"""Virtual ranks: every rank's call of a distributed operation in one process, and so on one GPU.

Each rank has a stream of its own. A kernel that exchanges with other ranks' kernels waits for them
on the GPU, so that between the first rank's launch and the last one's nothing may wait for the GPU:
arguments are there before, memory is at hand, and the kernels are loaded. On the CPU each rank has
a thread, where the ranks can meet.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from moetail.conformance.cases.tensors import tensors_in
from moetail.conformance.implementation import Implementation, load
from moetail.conformance.run.call import (
    GRAPH,
    STREAM,
    Call,
    CallResult,
    CallSpec,
    filled_memory,
    late,
    wanted,
)
from moetail.conformance.run.workspaces import CountingGather, Unsupported, Workspaces, virtual

__all__ = ["ENVIRONMENT", "Lost", "execute_together"]

ENVIRONMENT = {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""What CUDA must find when it starts: loading a kernel late may wait for the GPU to be idle, and
streams that share a connection wait for each other."""


class Lost(Exception):
    """The ranks did not get through a call together; the message says which and why."""


def execute_together(
    group: Any,
    rank: int,
    ranks: int,
    implementation: str,
    device: str,
    specs: tuple[CallSpec, ...],
    keep: bool = False,
) -> list[list[CallResult]]:
    """Make the calls of a distributed operation on virtual ranks.

    Args:
        group, rank: this process's among processes; of no use here.
        ranks: how many virtual ranks.
        implementation, device, specs, keep: as for :func:`.call.execute`.

    Returns:
        The outcomes by rank, then by call, up to and with the first one that some rank refused.

    Raises:
        Unsupported: the implementation has no virtual ranks for this.
        Lost: some rank waited for another in vain, or the device failed.
    """
    place = torch.device(device)
    if place.type == "cuda":
        place = torch.device("cuda", torch.cuda.current_device())
    loaded = load(implementation)
    make = virtual(loaded, ranks, place)
    workspaces = Workspaces(make, implementation, ("virtual", ranks), wanted(specs), keep)
    outcomes: list[list[CallResult]] = [[] for _ in range(ranks)]
    previous: list[dict[str, Any]] = [{} for _ in range(ranks)]
    try:
        for spec in specs:
            _load_kernels(loaded, spec, place)
            calls = [
                Call(loaded, spec, rank, place, previous[rank], workspace, _hook(own))
                for rank, (workspace, own) in enumerate(
                    workspaces.get(spec.case.hidden, spec.thresholds)
                )
            ]
            previous = [call.placed for call in calls]
            with filled_memory(spec.fill):
                _RUN.get(spec.mode, _eagerly)(calls, place)
            if any(call.hook is not None and call.hook.missing for call in calls):
                raise Unsupported(
                    "virtual ranks have no process group, and the workspaces that "
                    'BeamAllReduceWorkspace.virtual made no all_gather for "unfused"'
                )
            for rank, call in enumerate(calls):
                outcomes[rank].append(call.outcome())
            if any(call.raised for call in calls):
                workspaces.drop()
                break
            _raise_if_lost(calls)
    except BaseException as error:
        workspaces.drop()
        if isinstance(error, torch.OutOfMemoryError):
            raise Unsupported(f"no memory for {ranks} virtual ranks: {error}") from error
        raise
    return outcomes


def _hook(own: Callable[..., Any] | None) -> CountingGather:
    return CountingGather(own, distributed=False)


def _raise_if_lost(calls: Sequence[Call]) -> None:
    """What the workspaces know of the calls that were just made, if they say."""
    for call in calls:
        ask = getattr(call.workspace, "raise_if_lost", None)
        if callable(ask):
            try:
                ask()
            except Exception as error:
                raise Lost(f"rank {call.rank}: {type(error).__name__}: {error}") from error


# --- the calls of all ranks -----------------------------------------------------------------------


def _eagerly(calls: Sequence[Call], place: torch.device) -> None:
    _at_once([partial(call.attempt, call.compute) for call in calls], calls, place)


def _on_streams(calls: Sequence[Call], place: torch.device) -> None:
    """The values arrive late on every rank's stream."""
    _eagerly(calls, place)
    if not any(call.raised for call in calls):
        _at_once([partial(call.attempt, partial(late, call)) for call in calls], calls, place)


def _in_graphs(calls: Sequence[Call], place: torch.device) -> None:
    """A graph for each rank, captured and replayed on other values, then replayed twice on the
    case's."""
    _eagerly(calls, place)
    graphs = [torch.cuda.CUDAGraph() for _ in calls]

    def capture(index: int) -> Any:
        with torch.cuda.graph(graphs[index], stream=_streams(len(calls))[index]):
            return calls[index].compute()

    for index, call in enumerate(calls):
        if not any(other.raised for other in calls):
            call.attempt(partial(capture, index))
    if any(call.raised for call in calls):
        return
    for replay in range(3):
        if replay == 1:
            for call in calls:
                for tensor, values in call.pairs:
                    tensor.copy_(values)
        _at_once([graph.replay for graph in graphs], calls, place)


_RUN = {STREAM: _on_streams, GRAPH: _in_graphs}


def _at_once(
    actions: Sequence[Callable[[], Any]], calls: Sequence[Call], place: torch.device
) -> None:
    """Each rank's action, on its stream or in its thread; nothing is under way before and after."""
    if place.type != "cuda":
        threads = [threading.Thread(target=action) for action in actions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return
    streams = _streams(len(actions))
    _reserve_memory(streams, calls, place)
    _synchronize(place)
    for action, stream in zip(actions, streams, strict=True):
        with torch.cuda.stream(stream):
            action()
    _synchronize(place)


def _synchronize(place: torch.device) -> None:
    if place.type == "cuda":
        try:
            torch.cuda.synchronize(place)
        except Exception as error:
            raise Lost(f"{type(error).__name__}: {error}") from error


_STREAMS: list[Any] = []


def _streams(ranks: int) -> list[Any]:
    while len(_STREAMS) < ranks:
        _STREAMS.append(torch.cuda.Stream())  # type: ignore[no-untyped-call]
    return _STREAMS[:ranks]


def _reserve_memory(streams: Sequence[Any], calls: Sequence[Call], place: torch.device) -> None:
    """Let the allocator hold what a call may need on each stream, so that it asks CUDA for none."""
    size = max(sum(item.nbytes for _, item in tensors_in(call.placed)) for call in calls)
    size = min(size, 128 << 20)  # more than that are rows, which nothing of the same size answers
    for stream in streams:
        with torch.cuda.stream(stream):
            held = [torch.empty(2 * size + (32 << 20), dtype=torch.uint8, device=place)]
            held += [torch.empty(1 << 20, dtype=torch.uint8, device=place) for _ in range(8)]
            del held


_LOADED: set[tuple[str, str]] = set()


def _load_kernels(loaded: Implementation, spec: CallSpec, place: torch.device) -> None:
    """Make a call of that shape on one rank, which waits for nobody: what it builds or loads on
    first use is then there. What it raises, the ranks' own calls will."""
    with contextlib.suppress(Exception):
        case = spec.case.replace(ranks=1, source="normal", seed=0)
        if (loaded.spec, case.id) not in _LOADED:
            _LOADED.add((loaded.spec, case.id))
            (workspace,) = virtual(loaded, 1, place)(case.hidden, case.tokens)
            function = loaded.get(case.operation)
            function(**case.arguments(0, str(place)), workspace=workspace)
    _synchronize(place)
