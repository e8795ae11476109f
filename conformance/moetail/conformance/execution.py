"""Run an implementation on cases: in this process, or as one rank of several.

A check describes what it wants as steps. The same function carries them out for a local operation
and in every rank process of a distributed one, and reports per step what came back, what was
refused, and which arguments changed.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moetail.conformance import variations
from moetail.conformance.implementation import load
from moetail.conformance.producers import Case
from moetail.reference import BeamAllReduceWorkspace
from moetail.reference.operations import all_gather
from moetail.spec import operation
from moetail.spec.rules import FINALIZE

__all__ = [
    "EAGER",
    "GRAPH",
    "STREAM",
    "Outcome",
    "Raised",
    "Step",
    "bits",
    "execute",
    "flatten",
    "outputs",
    "same_bits",
]


EAGER, STREAM, GRAPH = "eager", "stream", "graph"


@dataclass(frozen=True)
class Step:
    """One call.

    Attributes:
        case: whose arguments are used.
        variation: a key of ``variations.VARIATIONS`` that changes the arguments first, or "".
        fill: memory that the call allocates starts as NaN, so that unwritten elements show.
        reuse: the case's values are copied into the tensors of the step before (same addresses),
            as when a captured graph is replayed.
        guard: every tensor lies between stretches of NaN, which the call must neither use nor
            change.
        mode: EAGER; on a GPU also STREAM (on another stream, where the inputs arrive late) or
            GRAPH (captured on other values, replayed on the case's).
        snapshot: compare every argument's bits before and after (needs a copy of each).
        thresholds: (moe_gather_oneshot_max_tokens, moe_gather_separate_norm_min_tokens) to set on
            the workspace, or None to leave them.
        max_tokens: of the workspace; 0 takes the largest T of the steps.
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
class Outcome:
    """What one step did on one rank.

    Attributes:
        value: what the call returned; None where it raised.
        refusal: "ValueError: ..." where it raised, else "".
        trace: the traceback of that.
        changed: names of the arguments whose bits changed, the destination of ``beam_moe_finalize``
            apart, unless the call raised.
        destination: whether the returned tensor is the destination that was given; True for
            operations without one.
        hook_calls: how often the workspace's ``all_gather`` was called.
    """

    value: Any = None
    refusal: str = ""
    trace: str = ""
    changed: tuple[str, ...] = ()
    destination: bool = True
    hook_calls: int = 0


class Raised(Exception):
    """A distributed operation raised on this rank. It must leave the rank's function as an error:
    only then does the pool know that the others may wait for this rank in vain.

    Attributes:
        outcomes: the steps up to and with the one that raised.
    """

    def __init__(self, outcomes: list[Outcome]) -> None:
        super().__init__(outcomes)
        self.outcomes = outcomes

    def __str__(self) -> str:
        return self.outcomes[-1].refusal


def flatten(arguments: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor among arguments or results, with a dotted name."""
    if isinstance(arguments, Tensor):
        yield prefix, arguments
    elif dataclasses.is_dataclass(arguments) and not isinstance(arguments, type):
        for item in dataclasses.fields(arguments):
            yield from flatten(getattr(arguments, item.name), f"{prefix}.{item.name}".strip("."))
    elif isinstance(arguments, Mapping):
        for name, value in arguments.items():
            yield from flatten(value, f"{prefix}.{name}".strip("."))
    elif isinstance(arguments, (list, tuple)):
        for index, value in enumerate(arguments):
            yield from flatten(value, f"{prefix}[{index}]")


def outputs(value: Any) -> dict[str, Tensor]:
    """An operation's results by the contract's names for them; None is left out."""
    pair = isinstance(value, (tuple, list)) and len(value) == 2
    named = dict(zip(("hidden", "normalized"), value, strict=True)) if pair else {"output": value}
    return dict(flatten(named))


_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """A tensor's elements as integers of their size."""
    return tensor.contiguous().view(_INTEGER[tensor.element_size()])


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal shape, dtype and bits: NaN equals itself and -0.0 differs from 0.0."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(bits(left), bits(right.to(left.device)))


def _switch() -> Any:
    return torch.utils.deterministic


@contextmanager
def _filled_memory() -> Iterator[None]:
    """Fresh floating-point tensors hold NaN, by torch's own switch for finding such faults."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = _switch().fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    _switch().fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        _switch().fill_uninitialized_memory = filled


@contextmanager
def _unfilled_memory() -> Iterator[None]:
    yield


def _refill(previous: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Write the tensors of ``arguments`` into those of ``previous``, where the shapes agree."""
    targets = dict(flatten(previous))
    for name, tensor in flatten(arguments):
        target = targets.get(name)
        if target is None or target.shape != tensor.shape or target.dtype != tensor.dtype:
            raise ValueError(f"a step that reuses buffers needs the same shapes; {name} differs")
        target.copy_(tensor)
    return {
        name: previous[name] if any(True for _ in flatten(value)) else value
        for name, value in arguments.items()
    }


class _Guards:
    """Arguments moved into buffers with NaN before and behind each tensor.

    The stretches are multiples of 256 bytes, so that alignment stays what it was.
    """

    _BYTES = 4096

    def __init__(self) -> None:
        self._walls: list[tuple[str, Tensor, Tensor]] = []

    def place(self, arguments: Any, prefix: str = "") -> Any:
        """``arguments`` with every tensor in a guarded buffer of its own."""
        if isinstance(arguments, Tensor):
            return self._surround(prefix, arguments)
        if dataclasses.is_dataclass(arguments) and not isinstance(arguments, type):
            changes = {
                item.name: self.place(getattr(arguments, item.name), f"{prefix}.{item.name}")
                for item in dataclasses.fields(arguments)
            }
            return dataclasses.replace(arguments, **changes)
        if isinstance(arguments, Mapping):
            return {name: self.place(value, name) for name, value in arguments.items()}
        return arguments

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


class _CountingGather:
    """The workspace's hook: torch.distributed's own collective, counted."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, source: Tensor, group: Any = None) -> None:
        self.calls += 1
        all_gather()(output, source, group=group)


class _Workspaces:
    """One workspace for each hidden size, for all steps of a check."""

    def __init__(self, implementation: Any, group: Any, steps: tuple[Step, ...]) -> None:
        self._factory: Any = implementation.target
        self._group = group
        self._steps = steps
        self._made: dict[int, Any] = {}

    def get(self, step: Step) -> Any:
        hidden = step.case.hidden
        if hidden not in self._made:
            tokens = [s.max_tokens or s.case.tokens for s in self._steps if s.case.hidden == hidden]
            factory: Any = getattr(self._factory, "BeamAllReduceWorkspace", None)
            if factory is None:
                factory = BeamAllReduceWorkspace  # the reference's serves who brings none
            workspace = factory.create(self._group, hidden, max(tokens), torch.bfloat16)
            if workspace is None:
                raise RuntimeError(
                    f"BeamAllReduceWorkspace.create returned None for {self._group.size()} ranks, "
                    f"hidden size {hidden}, BF16: the implementation does not support this machine"
                )
            self._made[hidden] = workspace
        workspace = self._made[hidden]
        if step.thresholds is not None:
            (
                workspace.moe_gather_oneshot_max_tokens,
                workspace.moe_gather_separate_norm_min_tokens,
            ) = step.thresholds
        return workspace


def execute(
    group: Any, rank: int, implementation: str, device: str, steps: tuple[Step, ...]
) -> list[Outcome]:
    """Carry out the steps on one rank; ``group`` is None for local operations."""
    if device == "cuda" and group is not None:
        device = f"cuda:{rank}"
    loaded = load(implementation)
    workspaces = _Workspaces(loaded, group, steps)
    outcomes: list[Outcome] = []
    previous: dict[str, Any] = {}
    for step in steps:
        arguments = step.case.arguments(rank, device)
        if step.reuse:
            arguments = _refill(previous, arguments)
        previous = arguments
        if step.variation:
            arguments = variations.apply(step.variation, step.case, rank, arguments)
        function = loaded.get(step.case.operation)
        outcomes.append(_call(function, step, rank, arguments, workspaces, torch.device(device)))
        if group is not None and outcomes[-1].refusal:
            raise Raised(outcomes)
    return outcomes


def _call(
    function: Callable[..., Any],
    step: Step,
    rank: int,
    arguments: dict[str, Any],
    workspaces: _Workspaces,
    device: torch.device,
) -> Outcome:
    guards = _Guards()
    if step.guard:
        arguments = guards.place(arguments)
    tensors = {name: tensor for name, tensor in flatten(arguments) if not tensor.is_meta}
    before = {name: tensor.clone() for name, tensor in tensors.items()} if step.snapshot else {}
    destination = arguments["output"] if step.case.operation == FINALIZE else None
    extra: dict[str, Any] = {}
    hook = _CountingGather()
    if operation(step.case.operation).distributed:
        workspace = workspaces.get(step)
        if hasattr(workspace, "all_gather"):
            workspace.all_gather = hook
        extra["workspace"] = workspace
    filled = _filled_memory() if step.fill else _unfilled_memory()
    if step.fill and destination is not None:
        destination.fill_(float("nan"))
    pairs: list[tuple[Tensor, Tensor]] = []
    if step.mode != EAGER:
        other = step.case.replace(seed=step.case.seed + 1)
        pairs = _exchange(arguments, other.arguments(rank, device))
    value, refusal, trace = None, "", ""
    with filled:  # outside of the try, so that a fault of the switch is none of the operation's
        try:
            if step.mode == EAGER:
                value = function(**arguments, **extra)
            else:
                value = _RUN[step.mode](function, arguments, pairs, extra)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except Exception as error:  # any exception is a refusal, whatever the check makes of it
            refusal, trace = f"{type(error).__name__}: {error}", traceback.format_exc()
    changed = tuple(
        name
        for name, copy in before.items()
        if not (tensors[name] is destination and not refusal) and not same_bits(copy, tensors[name])
    )
    changed += guards.broken()
    returned = destination is None or (
        isinstance(value, Tensor)
        and value.data_ptr() == destination.data_ptr()
        and value.shape == destination.shape
    )
    if destination is not None and isinstance(value, Tensor):
        value = value.clone()  # a later step may write the same destination
    return Outcome(value, refusal, trace, changed, returned, hook.calls)


_DELAY_CYCLES = 20_000_000  # about 10 ms


def _exchange(arguments: dict[str, Any], other: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Pairs of an argument's tensor and its values, after ``other``'s values were put into it."""
    pairs = []
    for (name, tensor), (_, replacement) in zip(flatten(arguments), flatten(other), strict=True):
        if tensor.shape != replacement.shape:
            raise ValueError(f"values can be exchanged between equal shapes only; {name} differs")
        pairs.append((tensor, tensor.clone()))
        tensor.copy_(replacement)
    return pairs


def _on_a_stream(
    function: Callable[..., Any],
    arguments: dict[str, Any],
    pairs: list[tuple[Tensor, Tensor]],
    extra: dict[str, Any],
) -> Any:
    """On another stream, where the values of ``pairs`` arrive late; elsewhere they are missing."""
    function(**arguments, **extra)  # whatever is built or loaded on first use
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        torch.cuda._sleep(_DELAY_CYCLES)  # type: ignore[no-untyped-call]
        for tensor, values in pairs:
            tensor.copy_(values)
        value = function(**arguments, **extra)
    stream.synchronize()
    return value


def _in_a_graph(
    function: Callable[..., Any],
    arguments: dict[str, Any],
    pairs: list[tuple[Tensor, Tensor]],
    extra: dict[str, Any],
) -> Any:
    """Captured and replayed on other values, then replayed twice on those of ``pairs``."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        function(**arguments, **extra)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = function(**arguments, **extra)
    graph.replay()
    for tensor, values in pairs:
        tensor.copy_(values)
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    return value


_RUN = {STREAM: _on_a_stream, GRAPH: _in_a_graph}
