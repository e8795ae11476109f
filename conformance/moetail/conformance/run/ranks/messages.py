"""What ranks say, and how values travel."""

from __future__ import annotations

import contextlib
import io
import pickle
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

__all__ = ["BEGUN", "Outcome", "RankFailure", "Where", "dumps"]

BEGUN = b""
"""A rank's message: what it was asked for begins. Any other is a pickled Outcome or Where."""


@dataclass(frozen=True)
class RankFailure:
    """What a rank raised.

    Attributes:
        type: name of the exception's class.
        message: ``str()`` of the exception.
        traceback: the rank's traceback as text.
        pickled: the exception; empty where it cannot be pickled.
    """

    type: str
    message: str
    traceback: str = field(default="", repr=False)
    pickled: bytes = field(default=b"", repr=False, compare=False)

    @cached_property
    def exception(self) -> BaseException | None:
        """The exception without its traceback; None where it does not pickle and unpickle."""
        with contextlib.suppress(Exception):
            # One whose arguments are not its constructor's pickles, but does not unpickle.
            found = pickle.loads(self.pickled)
            return found if isinstance(found, BaseException) else None
        return None


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: with ``value`` (pickled on its way), unless ``error`` is there.

    ``collectives`` says how many of the group's it took part in, and is None where its process
    cannot go on.
    """

    rank: int
    value: Any = None
    error: RankFailure | None = None
    collectives: int | None = 0


@dataclass(frozen=True)
class Where:
    """Where a rank is that has not ended: ``waiting`` for others, or not; its stack as text."""

    collectives: int
    waiting: bool
    stack: str


def dumps(value: Any) -> bytes:
    """Pickled, with tensors as bytes: they arrive on the CPU and share no memory."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor) or obj.layout is not torch.strided or obj.is_quantized:
            return NotImplemented
        tensor = obj.detach() if obj.is_meta else obj.detach().resolve_conj().resolve_neg()
        kind = tensor.dtype, tuple(tensor.shape), tensor.stride()
        if tensor.is_meta:
            return _tensor, (None, *kind)
        # The elements that the strides reach, gaps between them included.
        reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        flat = tensor.as_strided((reach if tensor.numel() else 0,), (1,))
        return _tensor, (bytearray(flat.cpu().view(torch.uint8).numpy()), *kind)


def _tensor(
    data: bytearray | None, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    if data is None:
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.as_strided(shape, strides)
