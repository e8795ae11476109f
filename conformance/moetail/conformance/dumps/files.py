"""The file of one call on one rank: writing it whole, reading it, and telling what is wrong."""

from __future__ import annotations

import inspect
import itertools
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

from msgspec import Raw
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moetail.conformance.cases.cut import tokens_of
from moetail.conformance.cases.tensors import tensors_in
from moetail.conformance.dumps.content import FORMAT, Content, Version, decode, encode
from moetail.conformance.dumps.values import Reader
from moetail.conformance.implementation import UsageError
from moetail.conformance.run.results import harmless
from moetail.reference import BeamAllReduceWorkspace
from moetail.spec import OPERATIONS, MoETail
from moetail.spec.rules import CONVERT, ROUTE_MAJOR, WORKSPACE

__all__ = [
    "CAPTURED",
    "CONVERSIONS",
    "Dump",
    "DumpError",
    "load_dump",
    "signature_of",
    "write_dump",
]

SUFFIX = ".safetensors"
CONVERSIONS = (CONVERT, ROUTE_MAJOR)
CAPTURED = tuple(item.name for item in OPERATIONS if item.name != WORKSPACE)

# Metadata keys: the call as :mod:`.content` has it, and a checksum of the file in which the
# checksum's own digits are zeros.
_CONTENT, _CHECKSUM = "moetail", "checksum"
_ZEROS = "0" * 32
# Bytes of a header. What is parsed takes some ten times as much.
_MOST_HEADER = 4 << 20


class DumpError(UsageError):
    """A file is not a dump, or is damaged; or files do not make one call together."""

    def __init__(self, path: object, found: str, allowed: str) -> None:
        # What a file says of itself is shown on one line, whatever it says, and not at any length.
        shown = [_line(text) for text in (str(path), found, allowed)]
        super().__init__(f"{shown[0]}: found {shown[1][:500]}; allowed: {shown[2][:500]}")


def _line(text: str) -> str:
    return harmless(text).replace("\n", "\\n")


def signature_of(operation_name: str) -> inspect.Signature:
    """The contract's signature of an operation, without self."""
    whole = inspect.signature(getattr(MoETail, operation_name))
    return whole.replace(parameters=list(whole.parameters.values())[1:])


def write_dump(path: Path, content: Content, tensors: Mapping[str, Tensor]) -> Path:
    """Write a dump, which appears under its name once it is complete.

    Args:
        path: its name without the suffix. Where there is a file of that name, or another process
            or thread is about to write one, the new one gets a number too.

    Returns:
        The file's name.

    Raises:
        UsageError: no content that could be read again.
        OSError, SafetensorError: it could not be written; nothing is left of it.
    """
    text = encode(content)
    try:
        decode(text, Content)
    except ValueError as error:
        raise UsageError(f"a call that cannot be saved ({error})") from None
    if len(text) > _MOST_HEADER // 2:
        raise UsageError(f"a call whose metadata has {len(text):,} bytes")
    part, whole = _reserve(path)
    try:
        mode = part.stat().st_mode  # what the umask gives; safetensors lets only the owner read
        save_file(dict(tensors), part, {_CONTENT: text.decode(), _CHECKSUM: _ZEROS})
        part.chmod(mode)
        with part.open("rb+") as file:
            head = _head(part, file)
            checksum = _digest(head, file)
            file.seek(head.index(_sealed(_ZEROS)))
            file.write(_sealed(checksum))
            file.flush()
            os.fsync(file.fileno())
        part.replace(whole)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return whole


def _reserve(path: Path) -> tuple[Path, Path]:
    """A file to fill, and the name to give it then, which nobody has and nobody else will give."""
    for number in itertools.count(1):
        name = f"{path.name}{f'-{number}' if number > 1 else ''}{SUFFIX}"
        part, whole = path.with_name(f".{name}.part"), path.with_name(name)
        try:
            part.open("xb").close()
        except FileExistsError:
            continue
        # Nobody makes the whole file without this part of it, so one may look before one writes.
        if not whole.exists():
            break
        part.unlink()
    return part, whole


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

    @property
    def shown(self) -> str:
        """The path, as it may be shown."""
        return _line(str(self.path))


_UNFIT = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError)
_WHOLE = "a file that moetail's capture has written, whole"


def load_dump(path: str | Path) -> Dump:
    """Read a dump; tensors are mapped into memory.

    Raises:
        DumpError: no such file, a truncated or damaged one, or one that capture did not write.
    """
    path = Path(path)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            kind = "a directory" if path.is_dir() else "a pipe, a socket or a device"
            raise DumpError(path, kind, _WHOLE)
        with path.open("rb") as file:
            content = _content(path, file)
        with safe_open(path, "pt", device="cpu") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except OSError as error:  # safetensors' too
        raise DumpError(path, error.strerror or str(error), _WHOLE) from None
    except (SafetensorError, *_UNFIT) as error:
        raise DumpError(path, f"what safetensors cannot read ({_why(error)})", _WHOLE) from None
    try:
        return _dump(path, content, tensors)
    except _UNFIT as error:
        raise DumpError(
            path, f"metadata that says what cannot be ({_why(error)})", _WHOLE
        ) from None


def _head(path: Path, file: BinaryIO) -> bytes:
    """A file's length of the header, and the header."""
    size = os.fstat(file.fileno()).st_size
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if size < 8 or length > size - 8:
        found = f"a file that ends within its header, or no safetensors file ({size:,} bytes)"
        raise DumpError(path, found, _WHOLE)
    if length > _MOST_HEADER:
        raise DumpError(path, f"a header of {length:,} bytes", f"at most {_MOST_HEADER:,}")
    return start + file.read(length)


def _sealed(checksum: str) -> bytes:
    # A quotation mark inside of a JSON string has a backslash before it: this is the key itself.
    return f'"{_CHECKSUM}":"{checksum}"'.encode()


def _digest(head: bytes, file: BinaryIO) -> str:
    """The checksum of ``head`` and of what follows in the file."""
    made = blake2b(head, digest_size=len(_ZEROS) // 2)
    while block := file.read(1 << 20):
        made.update(block)
    return made.hexdigest()


def _content(path: Path, file: BinaryIO) -> Content:
    """The metadata of a file whose checksum is right."""
    head = _head(path, file)
    try:
        header = decode(head[8:].rstrip(b" "), dict[str, dict[str, Raw]])
        metadata = header.get("__metadata__", {})
        texts = {name: decode(bytes(text), str, exactly=False) for name, text in metadata.items()}
    except ValueError as error:
        raise DumpError(
            path, f"a file without a safetensors header ({_why(error)})", _WHOLE
        ) from None
    if _CONTENT not in texts:
        raise DumpError(path, "a safetensors file without moetail's metadata", _WHOLE)
    checksum = texts.get(_CHECKSUM)
    if checksum is not None:
        found = _digest(head.replace(_sealed(checksum), _sealed(_ZEROS)), file)
        if found != checksum:
            raise DumpError(path, f"damaged content (checksum {found})", f"checksum {checksum}")
    try:
        text = texts[_CONTENT].encode()
        version = decode(text, Version, exactly=False).format
        content = decode(text, Content) if version == FORMAT else None
    except ValueError as error:
        raise DumpError(path, f"metadata of another form ({_why(error)})", _WHOLE) from None
    if content is None:
        allowed = f"format {FORMAT}; capture the call with this version of moetail"
        raise DumpError(path, f"format {version}", allowed)
    if checksum is None:
        raise DumpError(path, "no checksum", _WHOLE)
    return content


def _why(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _dump(path: Path, content: Content, tensors: Mapping[str, Tensor]) -> Dump:
    reader = Reader(tensors)
    arguments = {name: reader.value(value) for name, value in content.arguments.items()}
    result = reader.value(content.result)
    reader.finish()
    dump = Dump(
        path=path,
        operation=content.operation,
        function=harmless(content.function),
        arguments=arguments,
        result=result,
        raised=harmless(content.raised),
        trace=harmless(content.trace),
        changed=None if content.changed is None else tuple(content.changed),
        destination=content.destination,
        call=content.call,
        rank=content.rank,
        world_size=content.world_size,
        num_tokens=content.num_tokens,
        tokens=None if content.tokens is None else tuple(content.tokens),
        environment={harmless(key): harmless(one) for key, one in content.environment.items()},
    )
    _check(dump)
    return dump


def _check(dump: Dump) -> None:
    """Tells what the parts of a dump say of each other and cannot be."""

    def refuse(found: str, allowed: str) -> None:
        raise DumpError(dump.path, found, allowed)

    if dump.operation not in CAPTURED:
        refuse(f"operation {dump.operation!r}", ", ".join(CAPTURED))
    expected = signature_of(dump.operation).parameters
    unknown = [name for name in dump.arguments if name not in expected]
    needed = [name for name, one in expected.items() if one.default is one.empty]
    missing = [name for name in needed if name not in dump.arguments and name != "workspace"]
    if unknown or missing:
        parts = [f"no {name}" for name in missing] + [f"an argument {name}" for name in unknown]
        refuse(" and ".join(parts), f"{dump.operation}'s {', '.join(expected)}")
    places = [(dump.rank, dump.world_size)]
    if isinstance(workspace := dump.arguments.get("workspace"), BeamAllReduceWorkspace):
        places.append((workspace.rank, workspace.world_size))
    for rank, world_size in places:
        if rank >= world_size or (rank, world_size) != places[0]:
            refuse(f"rank {rank} of {world_size}", "a rank below world_size, one for the file")
    kept = dump.tokens
    if kept is not None:
        rows = tokens_of(dump.operation, dump.arguments)
        in_order = [*kept] == sorted({*kept}) and kept[-1:] < (dump.num_tokens,)
        if not (kept and in_order and len(kept) == rows):
            found = f"{rows} rows for {len(kept)} tokens of {dump.num_tokens}"
            refuse(found, "tokens of the call in order, and a row for each")
    names = {name for name, _ in tensors_in(dump.arguments)}
    if absent := [name for name in dump.changed or () if name not in names]:
        refuse(f"changes of {absent[0]}, which is no argument", "names of the call's tensors")
    if dump.raised and dump.result is not None:
        refuse("a result and an error of the call", "one of them")
