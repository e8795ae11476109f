"""The file of one call on one rank: writing it whole, reading it, and telling what is wrong."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moetail.conformance.dumps.values import Damaged, Reader
from moetail.conformance.implementation import UsageError
from moetail.spec import OPERATIONS, MoETail
from moetail.spec.rules import CONVERT, ROUTE_MAJOR, WORKSPACE

__all__ = [
    "CAPTURED",
    "CONVERSIONS",
    "FORMAT",
    "Dump",
    "DumpError",
    "load_dump",
    "signature_of",
    "write_dump",
]

FORMAT = 1
_KEY = "moetail"
CONVERSIONS = (CONVERT, ROUTE_MAJOR)
CAPTURED = tuple(item.name for item in OPERATIONS if item.name != WORKSPACE)


class DumpError(UsageError):
    """A file is not a dump, or is damaged; or files do not make one call together."""

    def __init__(self, path: object, found: str, allowed: str) -> None:
        super().__init__(f"{path}: found {found}; allowed: {allowed}")


def signature_of(operation_name: str) -> inspect.Signature:
    """The contract's signature of an operation, without self."""
    whole = inspect.signature(getattr(MoETail, operation_name))
    return whole.replace(parameters=list(whole.parameters.values())[1:])


def write_dump(path: Path, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a dump under its name once it is complete; a file of that name is replaced."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.touch()
        mode = part.stat().st_mode  # what the umask gives; safetensors lets only the owner read
        save_file(dict(tensors), part, {_KEY: json.dumps(content)})
        part.chmod(mode)
        with part.open("rb+") as written:
            os.fsync(written.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@dataclass(frozen=True)
class Dump:
    """One call on one rank, as it was saved.

    Attributes:
        path: the file.
        operation: of the contract.
        function: what was called, as module and name.
        arguments: by name, tensors on the CPU; ``output`` of ``beam_moe_finalize`` in shape only.
        result: what was returned, None where the call raised.
        raised, trace: "ValueError: ..." and the traceback, or "".
        changed: arguments that the call changed; None where that was not looked at.
        destination: whether the given output was returned, where there is one.
        call, rank, world_size: which call of the operation, where.
        num_tokens, tokens: T of the call, and which tokens were kept (None: all).
        environment: where it was captured.
    """

    path: Path
    operation: str
    function: str
    arguments: dict[str, Any]
    result: Any
    raised: str
    trace: str
    changed: tuple[str, ...] | None
    destination: bool | None
    call: int
    rank: int
    world_size: int
    num_tokens: int
    tokens: tuple[int, ...] | None
    environment: dict[str, str]


_WHOLE = "a file that moetail's capture has written, whole"


def load_dump(path: str | Path) -> Dump:
    """Read a dump; tensors are mapped into memory and read when they are used.

    Raises:
        DumpError: no such file, a truncated or damaged one, or one that capture did not write.
    """
    path = Path(path)
    _check_header(path)
    try:
        with safe_open(path, "pt", device="cpu") as opened:
            metadata = opened.metadata() or {}
            content = _content(path, metadata)
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise DumpError(path, f"what safetensors cannot read ({error})", _WHOLE) from None
    try:
        dump = _dump(path, content, Reader(tensors))
    except Damaged as error:
        raise DumpError(path, error.found, error.allowed) from None
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        found = f"metadata that cannot be read ({type(error).__name__}: {error})"
        raise DumpError(path, found, _WHOLE) from None
    _check_arguments(dump)
    return dump


def _check_header(path: Path) -> None:
    """Tells a truncated file from other things, which safetensors' errors do not."""
    try:
        size = path.stat().st_size
        with path.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or length > min(size - 8, 1 << 27):
                begins = "a file that ends within its header, or no safetensors file"
                raise DumpError(path, f"{begins} ({size:,} bytes)", _WHOLE)
            header = json.loads(opened.read(length))
            ends = [one["data_offsets"][1] for name, one in header.items() if name[:2] != "__"]
    except OSError as error:
        raise DumpError(path, error.strerror or str(error), _WHOLE) from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise DumpError(path, "a file without a safetensors header", _WHOLE) from None
    due = 8 + length + max(ends, default=0)
    if size != due:
        kind = "a truncated file" if size < due else "a file with something behind its end"
        raise DumpError(path, f"{kind}: {size:,} bytes where its header says {due:,}", _WHOLE)


def _content(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    if _KEY not in metadata:
        raise DumpError(path, "a safetensors file without moetail's metadata", _WHOLE)
    try:
        content = json.loads(metadata[_KEY])
    except ValueError as error:
        raise DumpError(path, f"metadata that is no JSON ({error})", _WHOLE) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise DumpError(path, f"format {found!r}", f"format {FORMAT}, of this version of moetail")
    return content


def _dump(path: Path, content: Mapping[str, Any], reader: Reader) -> Dump:
    def field(name: str, kind: type) -> Any:
        value = content.get(name)
        if not isinstance(value, kind):
            raise DumpError(path, f"{name} {value!r}", f"{name} as {kind.__name__}")
        return value

    name = field("operation", str)
    if name not in CAPTURED:
        raise DumpError(path, f"operation {name!r}", ", ".join(CAPTURED))
    if "result" not in content and not content.get("raised"):
        raise DumpError(path, "neither a result nor an error of the call", _WHOLE)
    rank, world_size = field("rank", int), field("world_size", int)
    if not 0 <= rank < world_size:
        raise DumpError(path, f"rank {rank} of {world_size}", "a rank below world_size")
    changed, tokens = content.get("changed"), content.get("tokens")
    arguments = field("arguments", dict)
    return Dump(
        path=path,
        operation=name,
        function=field("function", str),
        arguments={key: reader.value(value, key) for key, value in arguments.items()},
        result=reader.value(content.get("result"), "result"),
        raised=content.get("raised", ""),
        trace=content.get("trace", ""),
        changed=None if changed is None else tuple(changed),
        destination=content.get("destination"),
        call=field("call", int),
        rank=rank,
        world_size=world_size,
        num_tokens=field("num_tokens", int),
        tokens=None if tokens is None else tuple(tokens),
        environment=field("environment", dict),
    )


def _check_arguments(dump: Dump) -> None:
    expected = signature_of(dump.operation).parameters
    unknown = [name for name in dump.arguments if name not in expected]
    needed = [name for name, one in expected.items() if one.default is one.empty]
    missing = [name for name in needed if name not in dump.arguments and name != "workspace"]
    if unknown or missing:
        parts = [f"no {name}" for name in missing] + [f"an argument {name}" for name in unknown]
        raise DumpError(dump.path, " and ".join(parts), f"{dump.operation}'s {', '.join(expected)}")
