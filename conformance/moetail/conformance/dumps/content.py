"""What a dump's metadata says, as types: by them it is checked when it is written, and when read.

The form is JSON as :func:`encode` writes it, to the byte: a key twice, or an escape that need not
be one, is another form.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

__all__ = [
    "FORMAT",
    "MOST_SAID",
    "MOST_TRACED",
    "Content",
    "Empty",
    "Items",
    "Number",
    "Parts",
    "Stored",
    "Value",
    "Version",
    "View",
    "Whole",
    "Workspace",
    "decode",
    "encode",
]

FORMAT = 2

Integer = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Sizes = Annotated[list[Count], Meta(max_length=8)]

# Characters of what an exception says, and of its traceback.
MOST_SAID, MOST_TRACED = 1 << 12, 1 << 16


class _Form(Struct, tag_field="kind", forbid_unknown_fields=True):
    pass


class Number(_Form, tag="float"):
    """A float in hexadecimal, infinities and NaN too."""

    value: str


class Stored(_Form, tag="tensor"):
    """A tensor of the file; ``strides`` where it was not contiguous."""

    name: str
    strides: Sizes | None = None


class View(_Form, tag="view"):
    """Another tensor's memory, in this shape."""

    of: str
    shape: Sizes


class Empty(_Form, tag="empty"):
    """A tensor whose values mean nothing."""

    shape: Sizes
    dtype: str


class Workspace(_Form, tag="workspace"):
    """What a distributed operation reads of its workspace."""

    world_size: Count
    rank: Count
    hidden_size: Count
    max_tokens: Count
    moe_gather_oneshot_max_tokens: Count
    moe_gather_separate_norm_min_tokens: Count | None


Leaf = None | bool | Integer | str | Number | Stored | View | Empty


class Parts(_Form, tag="unfinalized"):
    """An ``UnfinalizedMoEOutput``, by its fields."""

    parts: dict[str, Leaf]


class Whole(_Form, tag="moe_output"):
    """A ``MoEOutput``, by its fields."""

    parts: dict[str, Leaf | Parts]


class Items(_Form, tag="items"):
    """A tuple, or a list."""

    of: Literal["list", "tuple"]
    items: list[Leaf | Parts | Whole]


Value = Leaf | Parts | Whole | Workspace | Items


class Version(Struct):
    """What every format says."""

    format: Count


class Content(Struct, forbid_unknown_fields=True):
    """A call, as :class:`.files.Dump` describes it; tensors are named, and lie beside it."""

    operation: str
    function: str
    call: Count
    rank: Count
    world_size: Count
    num_tokens: Count
    tokens: list[Count] | None
    arguments: dict[str, Value]
    environment: dict[str, str]
    result: Value = None
    raised: Annotated[str, Meta(max_length=MOST_SAID)] = ""
    trace: Annotated[str, Meta(max_length=MOST_TRACED)] = ""
    changed: list[str] | None = None
    destination: bool | None = None
    format: Count = FORMAT


Form = TypeVar("Form")


def encode(content: Any) -> bytes:
    return msgspec.json.encode(content)


def decode(text: bytes, form: type[Form], *, exactly: bool = True) -> Form:
    """Values of a form from JSON.

    Raises:
        ValueError: the text is not that form, or (``exactly``) says it in other bytes than
            :func:`encode` would.
    """
    try:
        found = msgspec.json.decode(text, type=form)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if exactly and encode(found) != text:
        raise ValueError("a key twice, or text that is written in another way")
    return found
