"""Capture: wrap functions so that their calls are saved."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from moetail.conformance.cases.cut import choose, cut_call, cut_result, tokens_of
from moetail.conformance.cases.tensors import tensors_in
from moetail.conformance.dumps.content import MOST_SAID, MOST_TRACED, Content
from moetail.conformance.dumps.files import (
    CAPTURED,
    CONVERSIONS,
    signature_of,
    write_dump,
)
from moetail.conformance.dumps.values import Saved
from moetail.conformance.implementation import UsageError
from moetail.conformance.run.call import same_bits
from moetail.conformance.run.results import environment, harmless
from moetail.spec import ContractError, operation
from moetail.spec.rules import FINALIZE, WORKSPACE

__all__ = ["Capture", "Mapped", "capture", "install"]


@dataclass(frozen=True)
class Mapped:
    """Any function, mapped onto an operation of the contract.

    Attributes:
        owner: the module or object whose attribute the function is.
        name: that attribute.
        operation: name of the operation that it carries out.
        arguments: the operation's arguments by name: a parameter of the function, or a callable
            that makes the value from all of them (a mapping by parameter name, defaults included,
            as they are before the call). Arguments with a default may be left out.
        result: makes the operation's result from the function's and from its arguments, such as
            ``lambda value, given: given["out"]``.
    """

    owner: Any
    name: str
    operation: str
    arguments: Mapping[str, str | Callable[[Mapping[str, Any]], Any]]
    result: Callable[[Any, Mapping[str, Any]], Any] = lambda value, given: value


@dataclass
class Capture:
    """What is captured, and where to.

    Attributes:
        folder: where files are written; None where nothing is captured.
        tokens: the tokens to keep of each call; None keeps calls whole.
        calls: which calls of each operation are saved, counted from 0 in each process.
        files: written so far.
    """

    folder: Path | None
    tokens: tuple[int, ...] | None = None
    calls: Container[int] = field(default_factory=lambda: range(1))
    files: list[Path] = field(default_factory=list)
    _seen: dict[str, int] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)
    _restore: list[Callable[[], None]] = field(default_factory=list)

    def wrap(self, owner: Any, name: str, bind: _Bind, operation_name: str) -> None:
        """Put a function that saves its calls in the place of ``owner.name``."""
        function = getattr(owner, name)
        own = name in getattr(owner, "__dict__", {})
        before = vars(owner)[name] if own else None
        shown = f"{_named(owner)}.{name}"

        def traced() -> None:
            text = "nothing is captured where torch compiles or traces; capture an eager run"
            self._tell(text, text)

        # The compiler calls it while it traces, and takes what it returns for a constant: the graph
        # stays whole. This is what torch.compiler.assume_constant_result sets, which would import
        # the compiler into processes that do not use it.
        traced._dynamo_marked_constant = True  # type: ignore[attr-defined]

        @wraps(function)
        def captured(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or _traced(*args, *kwargs.values()):
                traced()
                return function(*args, **kwargs)
            # What an operation calls on its way is part of it, and neither saved nor counted.
            if _DEPTH.value:
                return function(*args, **kwargs)
            with _inside():
                given: Mapping[str, Any] = {}
                call = result = None
                number = self._count(operation_name)
                with self._warning(operation_name, number):
                    if self._wanted(operation_name, number):
                        given, arguments, result = bind(function, args, kwargs)
                        compare = result is None
                        call = _Call(self, operation_name, number, shown, arguments, compare)
                try:
                    value = function(*args, **kwargs)
                except Exception as error:
                    if call is not None:
                        with self._warning(operation_name, number):
                            call.raised(error)
                    raise
                if call is not None:
                    with self._warning(operation_name, number):
                        call.returned(value if result is None else result(value, given))
                return value

        setattr(owner, name, captured)
        self._restore.append(
            (lambda: setattr(owner, name, before)) if own else (lambda: delattr(owner, name))
        )

    def _count(self, operation_name: str) -> int:
        """The number of this call of the operation."""
        with _LOCK:
            number = self._seen[operation_name] = self._seen.get(operation_name, -1) + 1
        return number

    def _wanted(self, operation_name: str, number: int) -> bool:
        if number not in self.calls:
            return False
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise UsageError("a CUDA graph is being captured; capture an eager call instead")
        return True

    @contextmanager
    def _warning(self, operation_name: str, number: int) -> Iterator[None]:
        """Makes a warning of whatever goes wrong: the program that is looked at goes on."""
        try:
            yield
        except Exception as error:
            why = (
                str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"
            )
            reason = error.strerror if isinstance(error, OSError) else None
            self._tell(f"call {number} of {operation_name} is not saved: {why}", reason or why)

    def _tell(self, text: str, reason: str) -> None:
        """Warns of each reason once."""
        with _LOCK:
            if reason in self._told:
                return
            self._told.add(reason)
        try:
            warnings.warn(f"moetail: {text}", stacklevel=5)
        except Warning as error:  # where warnings are errors
            with contextlib.suppress(Exception):
                print(error, file=sys.stderr)

    def close(self) -> None:
        """Put the functions back."""
        while self._restore:
            self._restore.pop()()


_Bound = tuple[Mapping[str, Any], dict[str, Any], Callable[[Any, Mapping[str, Any]], Any] | None]
_Bind = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], _Bound]


_LOCK = threading.Lock()


class _Depth(threading.local):
    value = 0


_DEPTH = _Depth()


def _traced(*values: Any) -> bool:
    """Whether what is done to tensors is recorded: a copy would become part of the record."""
    tracing: Any = torch.jit
    return (
        tracing.is_tracing()
        or is_in_torch_dispatch_mode()
        or any(isinstance(value, torch.fx.Proxy) for value in values)
    )


@contextmanager
def _inside() -> Iterator[None]:
    _DEPTH.value += 1
    try:
        yield
    finally:
        _DEPTH.value -= 1


@contextmanager
def capture(
    folder: str | Path | None = None,
    *targets: Any,
    operations: Sequence[str] | None = None,
    mapped: Sequence[Mapped] = (),
    tokens: Iterable[int] | None = None,
    calls: Container[int] | None = None,
) -> Iterator[Capture]:
    """Save arguments and results of calls, one file for each call and rank.

    Args:
        folder: where to, made if need be; None takes the environment's ``MOETAIL_CAPTURE``, and
            captures nothing if that is not set.
        targets: modules or objects that provide operations of the contract, by its names and with
            its signatures. Names that were imported from a module elsewhere are not wrapped there:
            give that other module.
        operations: which operations of the targets, by name or column heading; None: all.
        mapped: functions of another name or signature.
        tokens: keep only these tokens of each call, as a smaller call (see
            :mod:`moetail.conformance.cases.cut`); a call that has none of them is passed over.
            None takes ``MOETAIL_CAPTURE_TOKENS`` (such as ``0,7,100:120``), or else all. The two
            conversions are saved whole.
        calls: which calls of each operation to save, counted from 0. None takes
            ``MOETAIL_CAPTURE_CALLS`` (written likewise), or else the first alone.

    Yields:
        A :class:`Capture`, whose ``files`` lists what was written.

    Raises:
        UsageError: no such operation; a target that provides none; a mapping that does not fit its
            operation.

    Saving copies every tensor to the CPU before the call, and once more after it to see which were
    changed (RUN-2), so it waits for the GPU. Calls made while a CUDA graph is being captured, or
    while torch compiles, are not saved. Files appear whole or not at all.

    Whatever keeps a call from being saved (a full disk, a folder that is gone, an argument that no
    call of the operation has) is one warning, and nothing else to the program: calls return and
    raise what they would without a capture.
    """
    made = _start(folder, targets, operations, mapped, tokens, calls)
    try:
        yield made
    finally:
        made.close()


def install(
    *targets: Any, operations: Sequence[str] | None = None, mapped: Sequence[Mapped] = ()
) -> Capture:
    """Capture for the life of the process, if the environment's ``MOETAIL_CAPTURE`` names a folder.

    One line at the end of a module puts its operations behind that switch; without it, nothing is
    wrapped and calls cost nothing::

        install(sys.modules[__name__])

    Args and errors as for :func:`capture`.
    """
    return _start(None, targets, operations, mapped, None, None)


def _start(
    folder: str | Path | None,
    targets: Sequence[Any],
    operations: Sequence[str] | None,
    mapped: Sequence[Mapped],
    tokens: Iterable[int] | None,
    calls: Container[int] | None,
) -> Capture:
    if folder is None:
        folder = os.environ.get("MOETAIL_CAPTURE") or None
    if tokens is None:
        tokens = _numbers("MOETAIL_CAPTURE_TOKENS")
    if calls is None:
        calls = _numbers("MOETAIL_CAPTURE_CALLS") or range(1)
    made = Capture(
        None if folder is None else Path(folder).expanduser(),
        None if tokens is None else tuple(tokens),
        calls,
    )
    asked = CAPTURED if operations is None else tuple(_known(name) for name in operations)
    found = [(target, name) for target in targets for name in asked if callable(_get(target, name))]
    for target in targets:
        if not any(target is other for other, _ in found):
            raise UsageError(
                f"capture: {_named(target)} provides none of {', '.join(asked)}; "
                "allowed: a module or an object with operations of the contract"
            )
    for item in mapped:
        _check_mapping(item)
    if made.folder is None:
        return made
    try:
        made.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        made.folder = None
        made._tell(f"nothing is captured: {error}", "folder")
        return made
    for target, name in found:
        made.wrap(target, name, _bind_contract(target, name), name)
    for item in mapped:
        made.wrap(item.owner, item.name, _bind_mapped(item), _known(item.operation))
    return made


def _get(target: Any, name: str) -> Any:
    return getattr(target, name, None)


def _known(name: str) -> str:
    try:
        known = operation(name).name
    except ContractError as error:
        raise UsageError(f"capture: {error.found}; allowed: {', '.join(CAPTURED)}") from None
    if known == WORKSPACE:
        raise UsageError(f"capture: {name} computes nothing; allowed: {', '.join(CAPTURED)}")
    return known


def _numbers(variable: str) -> tuple[int, ...] | None:
    """ "0,7,100:120" as numbers; None where the variable is not set."""
    text = os.environ.get(variable, "")
    if not text:
        return None
    numbers: list[int] = []
    for part in text.split(","):
        ends = re.fullmatch(r"\s*(\d+)\s*(?::\s*(\d+)\s*)?", part)
        if ends is None:
            raise UsageError(
                f"{variable}: {text!r}; allowed: numbers and ranges, as in 0,7,100:120"
            )
        first = int(ends[1])
        numbers += range(first, int(ends[2])) if ends[2] else [first]
    return tuple(numbers)


def _bind_contract(target: Any, name: str) -> _Bind:
    signature = signature_of(name)
    # A plain function of a class gets the instance first.
    method = inspect.isclass(target) and inspect.isfunction(inspect.getattr_static(target, name))

    def bind(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Bound:
        try:
            bound = signature.bind(*args[1:] if method else args, **kwargs)
        except TypeError as error:
            raise UsageError(
                f"not called as {name}{signature}: {error}; "
                "allowed: the contract's arguments, or a mapping (Mapped)"
            ) from None
        return {}, dict(bound.arguments), None

    return bind


def _check_mapping(item: Mapped) -> None:
    name = _known(item.operation)
    function = _get(item.owner, item.name)
    if not callable(function):
        raise UsageError(f"capture: {_named(item.owner)} has no function {item.name}")
    expected = signature_of(name).parameters
    unknown = set(item.arguments) - set(expected)
    if unknown:
        raise UsageError(
            f"capture: {name} has no argument {', '.join(sorted(unknown))}; "
            f"allowed: {', '.join(expected)}"
        )
    needed = [key for key, one in expected.items() if one.default is one.empty]
    missing = [key for key in needed if key not in item.arguments and key != "workspace"]
    if missing:
        raise UsageError(
            f"capture: the mapping of {item.name} leaves out {', '.join(missing)} of {name}"
        )
    parameters = inspect.signature(function).parameters
    absent = [one for one in item.arguments.values() if isinstance(one, str)]
    absent = [one for one in absent if one not in parameters]
    if absent:
        raise UsageError(
            f"capture: {item.name} has no parameter {', '.join(absent)}; "
            f"allowed: {', '.join(parameters)}, or a callable"
        )


def _bind_mapped(item: Mapped) -> _Bind:
    def bind(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Bound:
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        arguments = {
            name: given[source] if isinstance(source, str) else source(given)
            for name, source in item.arguments.items()
        }
        return given, arguments, item.result

    return bind


def _named(owner: Any) -> str:
    """A module's name; a class's, or that of an object's class."""
    if inspect.ismodule(owner):
        return owner.__name__
    kind = owner if inspect.isclass(owner) or inspect.isfunction(owner) else type(owner)
    return f"{kind.__module__}.{kind.__qualname__}"


class _Call:
    """One call on its way into a file."""

    def __init__(
        self,
        capture: Capture,
        operation_name: str,
        number: int,
        function: str,
        arguments: dict[str, Any],
        compare: bool,
    ) -> None:
        self.capture, self.operation, self.arguments = capture, operation_name, arguments
        self.rank, self.world_size = _place(arguments)
        self.kept: list[int] | None = None
        self.num_tokens = 0
        cut = arguments
        # An illegal call, which is to be refused, may be one that cannot be cut: it is saved whole.
        with contextlib.suppress(RuntimeError, LookupError, AttributeError, TypeError, ValueError):
            self.num_tokens = tokens_of(operation_name, arguments)
            if capture.tokens is not None and operation_name not in CONVERSIONS:
                kept = choose(operation_name, capture.tokens, self.num_tokens, self.world_size)
                cut = cut_call(operation_name, arguments, kept, self.rank, self.world_size)
                self.kept = kept
        self.skip = self.kept == []
        if self.skip:
            return
        self.saved = Saved(views=operation_name in CONVERSIONS)
        destination = ("output",) if operation_name == FINALIZE else ()
        self.content = Content(
            operation=operation_name,
            function=function,
            call=number,
            rank=self.rank,
            world_size=self.world_size,
            num_tokens=self.num_tokens,
            tokens=self.kept,
            arguments={
                name: self.saved.add(value, name, shape_only=name in destination)
                for name, value in cut.items()
            },
            environment=_environment(arguments, function),
        )
        self.compare = compare

    def _cut(self) -> dict[str, Any]:
        if self.kept is None:
            return dict(self.arguments)
        return cut_call(self.operation, self.arguments, self.kept, self.rank, self.world_size)

    def returned(self, value: Any) -> None:
        if self.skip:
            return
        kept = self.kept
        result = value if kept is None else cut_result(value, self.num_tokens, kept)
        if self.compare:
            self.content.changed = self._changed()
        if self.operation == FINALIZE and self.compare:
            given = self.arguments["output"]
            self.content.destination = (
                isinstance(value, Tensor)
                and isinstance(given, Tensor)
                and value.data_ptr() == given.data_ptr()
                and value.shape == given.shape
            )
        self.content.result = self.saved.add(result, "result")
        self._write()

    def raised(self, error: Exception) -> None:
        if self.skip:
            return
        if self.compare:
            self.content.changed = self._changed()
        said = f"{type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        self.content.raised = harmless(said[:MOST_SAID])[:MOST_SAID]
        self.content.trace = harmless(trace[:MOST_TRACED])[:MOST_TRACED]
        self._write()

    def _changed(self) -> list[str]:
        """Arguments whose bits the call changed, among what is saved of them."""
        after = dict(tensors_in({k: v for k, v in self._cut().items() if k != "workspace"}))
        return [
            name
            for name, before in self.saved.tensors.items()
            if name in after and not same_bits(before, after[name])
        ]

    def _write(self) -> None:
        assert self.capture.folder is not None
        self.saved.check()
        rank = f"rank{self.rank}of{self.world_size}"
        name = f"{self.operation}-{self.content.call:04d}-{rank}-{os.getpid()}"
        path = write_dump(self.capture.folder / name, self.content, self.saved.tensors)
        self.capture.files.append(path)


def _place(arguments: Mapping[str, Any]) -> tuple[int, int]:
    """(rank, ranks) of this process."""
    workspace: Any = arguments.get("workspace")
    if hasattr(workspace, "rank") and hasattr(workspace, "world_size"):
        return int(workspace.rank), int(workspace.world_size)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def _environment(arguments: Mapping[str, Any], function: str) -> dict[str, str]:
    tensors = [tensor for _, tensor in tensors_in(dict(arguments))]
    device = str(tensors[0].device) if tensors else "cpu"
    found = {key: str(one) for key, one in environment(device).items()} | {"device": device}
    for package in dict.fromkeys(("moetail", function.split(".")[0])):
        with contextlib.suppress(PackageNotFoundError, ValueError):
            found[package] = version(package)
    return found
