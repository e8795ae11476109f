"""Run an implementation on cases: in this process, or as one rank of several.

A check describes the calls it wants. The same function carries them out for a local operation
and in every rank process of a distributed one, and reports per call what came back, what was
refused, and which arguments changed.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moetail.conformance.adapters import NotMapped
from moetail.conformance.cases import Case, variations
from moetail.conformance.cases.rewrites import REWRITES
from moetail.conformance.cases.tensors import mapped, tensors_in
from moetail.conformance.implementation import Implementation, load
from moetail.conformance.run.workspaces import CountingGather, Workspaces, real
from moetail.spec import operation
from moetail.spec.rules import FINALIZE

__all__ = [
    "EAGER",
    "GRAPH",
    "STREAM",
    "Call",
    "CallResult",
    "CallSpec",
    "Raised",
    "bits",
    "execute",
    "filled_memory",
    "late",
    "outputs",
    "same_bits",
    "wanted",
]


EAGER, STREAM, GRAPH = "eager", "stream", "graph"


@dataclass(frozen=True)
class CallSpec:
    """A call as a check wants it.

    Attributes:
        case: whose arguments are used.
        variation: that changes the arguments first, by :func:`.variations.apply`, or "".
        fill: memory that the call allocates starts as NaN, so that unwritten elements show.
        reuse: the case's values are copied into the tensors of the call before (same addresses),
            as when a captured graph is replayed.
        guard: every tensor lies between stretches of NaN, which the call must neither use nor
            change.
        mode: EAGER; on a GPU also STREAM (on another stream, where the inputs arrive late) or
            GRAPH (captured on other values, replayed on the case's).
        snapshot: compare every argument's bits before and after (needs a copy of each).
        thresholds: (moe_gather_oneshot_max_tokens, moe_gather_separate_norm_min_tokens) to set on
            the workspace, or None to leave them.
        max_tokens: of the workspace, which is then made for these calls alone; 0 takes the largest
            T of the calls, or a workspace for more that has served calls before.
    """

    case: Case
    variation: str = ""
    fill: bool = False
    reuse: bool = False
    guard: bool = False
    mode: str = EAGER
    snapshot: bool = True
    thresholds: tuple[int, int | None] | None = None
    max_tokens: int = 0


@dataclass(frozen=True)
class CallResult:
    """What one call did on one rank.

    Attributes:
        value: what the call returned; None where it raised.
        refusal: "ValueError: ..." where it raised, else "".
        trace: the traceback of that.
        not_mapped: what an adapter has nothing to map to, where it raised NotMapped, else "".
        no_memory: whether it raised since memory could not be had; an illegal access is no such
            thing.
        changed: names of the arguments whose bits changed, the destination of ``beam_moe_finalize``
            apart, unless the call raised.
        destination: whether the returned tensor is the destination that was given; True for
            operations without one.
        hook_calls: how often the workspace's ``all_gather`` was called.
    """

    value: Any = None
    refusal: str = ""
    trace: str = ""
    not_mapped: str = ""
    no_memory: bool = False
    changed: tuple[str, ...] = ()
    destination: bool = True
    hook_calls: int = 0


class Raised(Exception):
    """A distributed operation raised on this rank. It must leave the rank's function as an error:
    only then does the pool know that the others may wait for this rank in vain.

    Attributes:
        outcomes: of the calls up to and with the one that raised.
    """

    def __init__(self, outcomes: list[CallResult]) -> None:
        super().__init__(outcomes)
        self.outcomes = outcomes

    def __str__(self) -> str:
        return self.outcomes[-1].refusal


def outputs(value: Any) -> dict[str, Tensor]:
    """An operation's results by the contract's names for them; None is left out."""
    pair = isinstance(value, (tuple, list)) and len(value) == 2
    named = dict(zip(("hidden", "normalized"), value, strict=True)) if pair else {"output": value}
    return dict(tensors_in(named))


_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """A tensor's elements as integers of their size."""
    return tensor.contiguous().view(_INTEGER[tensor.element_size()])


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal shape, dtype and bits: NaN equals itself and -0.0 differs from 0.0."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(bits(left), bits(right.to(left.device)))


@contextlib.contextmanager
def filled_memory(filled: bool) -> Iterator[None]:
    """Fresh floating-point tensors hold NaN, by torch's own switch for finding such faults; if not
    ``filled``, nothing changes. The switch is the process's, not the thread's."""
    if not filled:
        yield
        return
    # Unlike use_deterministic_algorithms, the debug mode does not import the compiler first.
    mode = torch.get_deterministic_debug_mode()
    switch: Any = torch.utils.deterministic
    fills = switch.fill_uninitialized_memory
    torch.set_deterministic_debug_mode(1)  # warns where an operation is not deterministic
    switch.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        switch.fill_uninitialized_memory = fills


def _refill(previous: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Write the tensors of ``arguments`` into those of ``previous``, where the shapes agree."""
    targets = dict(tensors_in(previous))
    for name, tensor in tensors_in(arguments):
        target = targets.get(name)
        if target is None or target.shape != tensor.shape or target.dtype != tensor.dtype:
            raise ValueError(f"a call that reuses buffers needs the same shapes; {name} differs")
        target.copy_(tensor)
    return {
        name: previous[name] if any(True for _ in tensors_in(value)) else value
        for name, value in arguments.items()
    }


class _Guards:
    """Arguments moved into buffers with NaN before and behind each tensor.

    The stretches are multiples of 256 bytes, so that alignment stays what it was.
    """

    _BYTES = 4096

    def __init__(self) -> None:
        self._walls: list[tuple[str, Tensor, Tensor]] = []

    def place(self, arguments: Any) -> Any:
        """``arguments`` with every tensor in a guarded buffer of its own."""
        names = (name for name, _ in tensors_in(arguments))
        return mapped(arguments, lambda tensor: self._surround(next(names), tensor))

    def _surround(self, name: str, tensor: Tensor) -> Tensor:
        wall = self._BYTES // tensor.element_size()
        buffer = tensor.new_empty(2 * wall + tensor.numel())
        poison = float("nan") if tensor.is_floating_point() else -(1 << 30)
        buffer.fill_(poison)
        inside = buffer[wall : wall + tensor.numel()].view(tensor.shape)
        inside.copy_(tensor)
        for side in (buffer[:wall], buffer[wall + tensor.numel() :]):
            self._walls.append((f"the memory around {name}", side, side.clone()))
        return inside

    def broken(self) -> tuple[str, ...]:
        """What lies around which tensors was changed."""
        changed = [name for name, side, before in self._walls if not same_bits(side, before)]
        return tuple(dict.fromkeys(changed))


class Call:
    """One rank's call: its arguments, and what is compared before and after it.

    Attributes:
        spec, rank, device, workspace: whose call it is, where, and with what (None if local).
        hook: counts the workspace's gathers.
        placed: the case's arguments as they were put, for a call that reuses them.
        pairs: where the mode is not EAGER, each argument's tensor, which holds other values
            for now, and the case's values.
        value: what it returned.
        raised: what it raised, as the fields that :class:`CallResult` has for that; else empty.
    """

    def __init__(
        self,
        loaded: Implementation,
        spec: CallSpec,
        rank: int,
        device: torch.device,
        previous: dict[str, Any],
        workspace: Any = None,
        hook: CountingGather | None = None,
    ) -> None:
        self.spec, self.rank, self.device = spec, rank, device
        self.workspace, self.hook = workspace, hook
        self.value: Any = None
        self.raised: dict[str, Any] = {}
        self._function = loaded.get(spec.case.operation)
        arguments = spec.case.arguments(rank, str(device))
        if spec.reuse:
            arguments = _refill(previous, arguments)
        self.placed = arguments
        if spec.variation:
            arguments = variations.apply(spec.variation, spec.case, rank, arguments)
        self._guards = _Guards()
        if spec.guard:
            arguments = self._guards.place(arguments)
        self._tensors = {name: item for name, item in tensors_in(arguments) if not item.is_meta}
        self._before = (
            {name: tensor.clone() for name, tensor in self._tensors.items()}
            if spec.snapshot
            else {}
        )
        self._destination = arguments["output"] if spec.case.operation == FINALIZE else None
        if spec.fill and self._destination is not None:
            self._destination.fill_(float("nan"))
        self.pairs: list[tuple[Tensor, Tensor]] = []
        if spec.mode != EAGER:
            other = spec.case.replace(seed=spec.case.seed + 1)
            self.pairs = _exchange(arguments, other.arguments(rank, str(device)))
        self._arguments = arguments
        if workspace is not None:
            if hasattr(workspace, "all_gather"):
                workspace.all_gather = hook
            self._arguments = {**arguments, "workspace": workspace}

    def compute(self) -> Any:
        """What the implementation returns for the arguments."""
        return self._function(**self._arguments)

    def attempt(self, compute: Callable[[], Any]) -> None:
        """Keep what ``compute`` returns or raises."""
        try:
            self.value = compute()
        except Exception as error:  # any exception is a refusal, whatever the check makes of it
            self.value, self.raised = None, _described(error)

    def outcome(self) -> CallResult:
        """What came of it, and what it changed; nothing may be under way on the device."""
        changed = tuple(
            name
            for name, copy in self._before.items()
            if not (self._tensors[name] is self._destination and not self.raised)
            and not same_bits(copy, self._tensors[name])
        )
        changed += self._guards.broken()
        value, destination = self.value, self._destination
        returned = destination is None or (
            isinstance(value, Tensor)
            and value.data_ptr() == destination.data_ptr()
            and value.shape == destination.shape
        )
        if destination is not None and isinstance(value, Tensor):
            value = value.clone()  # a later call may write the same destination
        calls = 0 if self.hook is None else self.hook.calls
        return CallResult(
            value, changed=changed, destination=returned, hook_calls=calls, **self.raised
        )


# Whose exception it is may be any library's, so that only words tell.
_NO_MEMORY = ("OutOfMemory", "out of memory", "MemoryError", "allocate memory", "MemoryAllocation")


def _described(error: Exception) -> dict[str, Any]:
    """What is kept of an exception: not itself, since it holds on to the arguments."""
    refusal = f"{type(error).__name__}: {error}"
    return {
        "refusal": refusal,
        "trace": traceback.format_exc(),
        "not_mapped": str(error) if isinstance(error, NotMapped) else "",
        "no_memory": any(word in refusal for word in _NO_MEMORY),
    }


def wanted(specs: tuple[CallSpec, ...]) -> list[tuple[int, int, bool]]:
    """What the calls want of a workspace: H, ``max_tokens``, and whether it must be a new one.

    One that an earlier call has broken would refuse whatever comes, and so hide what is accepted.
    """

    def new(spec: CallSpec) -> bool:
        refused = bool(spec.variation) and spec.variation not in REWRITES
        return refused or spec.max_tokens > 0

    return [(spec.case.hidden, spec.max_tokens or spec.case.tokens, new(spec)) for spec in specs]


def execute(
    group: Any,
    rank: int,
    implementation: str,
    device: str,
    specs: tuple[CallSpec, ...],
    keep: bool = False,
) -> list[CallResult]:
    """Make the calls on one rank.

    Args:
        group: the process group; None for local operations.
        rank: this process's.
        implementation: as :func:`moetail.conformance.implementation.load` takes it.
        device: "cpu" or "cuda".
        specs: the calls, in order.
        keep: workspaces may have served earlier executions, and are kept for later ones.

    Raises:
        Raised: a distributed operation raised; the calls behind it are not made.
    """
    if device == "cuda" and group is not None:
        device = f"cuda:{rank}"
    loaded = load(implementation)
    workspaces = Workspaces(real(loaded, group), implementation, group, wanted(specs), keep)
    outcomes: list[CallResult] = []
    previous: dict[str, Any] = {}
    try:
        for spec in specs:
            workspace, hook = None, None
            if operation(spec.case.operation).distributed:
                ((workspace, own),) = workspaces.get(spec.case.hidden, spec.thresholds)
                hook = CountingGather(own)
            call = Call(loaded, spec, rank, torch.device(device), previous, workspace, hook)
            previous = call.placed
            with filled_memory(spec.fill):
                call.attempt(partial(_alone, call))
            outcomes.append(call.outcome())
            del call  # its copies of the arguments may be large
            if group is not None and outcomes[-1].refusal:
                raise Raised(outcomes)
    except BaseException:
        workspaces.drop()
        raise
    return outcomes


def _alone(call: Call) -> Any:
    value = call.compute() if call.spec.mode == EAGER else _RUN[call.spec.mode](call)
    if call.device.type == "cuda":
        torch.cuda.synchronize(call.device)
    return value


_DELAY_CYCLES = 20_000_000  # about 10 ms


def _exchange(arguments: dict[str, Any], other: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Pairs of an argument's tensor and its values, after ``other``'s values were put into it."""
    pairs = []
    for (name, tensor), (_, replacement) in zip(
        tensors_in(arguments), tensors_in(other), strict=True
    ):
        if tensor.shape != replacement.shape:
            raise ValueError(f"values can be exchanged between equal shapes only; {name} differs")
        pairs.append((tensor, tensor.clone()))
        tensor.copy_(replacement)
    return pairs


def late(call: Call) -> Any:
    """The call on the current stream, where its values arrive late; elsewhere they are missing."""
    torch.cuda._sleep(_DELAY_CYCLES)  # type: ignore[no-untyped-call]
    for tensor, values in call.pairs:
        tensor.copy_(values)
    return call.compute()


def _on_a_stream(call: Call) -> Any:
    call.compute()  # whatever is built or loaded on first use
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        value = late(call)
    stream.synchronize()
    return value


def _in_a_graph(call: Call) -> Any:
    """Captured and replayed on other values, then replayed twice on the case's."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        call.compute()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = call.compute()
    graph.replay()
    for tensor, values in call.pairs:
        tensor.copy_(values)
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    return value


_RUN = {STREAM: _on_a_stream, GRAPH: _in_a_graph}
