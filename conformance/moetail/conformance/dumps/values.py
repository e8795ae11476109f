"""A call's values as a dump's metadata beside named tensors, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from math import prod
from numbers import Integral, Real
from typing import Any

import msgspec
import torch
from torch import Tensor

from moetail.conformance.dumps.content import (
    Empty,
    Items,
    Number,
    Parts,
    Stored,
    Value,
    View,
    Whole,
    Workspace,
)
from moetail.conformance.implementation import UsageError
from moetail.conformance.run.call import same_bits
from moetail.reference import BeamAllReduceWorkspace
from moetail.spec import MoEOutput, UnfinalizedMoEOutput

__all__ = ["Reader", "Saved"]

_CARRIERS = ((Parts, UnfinalizedMoEOutput), (Whole, MoEOutput))


class Saved:
    """Values as metadata, and their tensors by name, copied to the CPU.

    A tensor may be stored as a view of an earlier one that it shares its memory with, where that
    matters (``views``): the copy that is loaded then shares memory again.
    """

    def __init__(self, *, views: bool = False) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._views = views
        self._at: dict[tuple[int, torch.dtype, int], str] = {}
        self._spread = 0

    def add(self, value: Any, name: str, *, shape_only: bool = False) -> Value:
        """``value`` in the form of :mod:`.content`.

        Raises:
            UsageError: it is none of what calls are made of.
        """
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return str(value)
        if isinstance(value, Tensor):
            return self._tensor(value, name, shape_only)
        if isinstance(value, Integral):
            return int(value)
        if isinstance(value, Real):
            return Number(float(value).hex())
        if isinstance(value, (list, tuple)):
            items: Any = [self.add(item, f"{name}[{i}]") for i, item in enumerate(value)]
            return Items("list" if isinstance(value, list) else "tuple", items)
        parts: Any
        for form, known in _CARRIERS:
            names = [item.name for item in fields(known)]
            if is_dataclass(value) and all(hasattr(value, key) for key in names):
                parts = {key: self.add(getattr(value, key), f"{name}.{key}") for key in names}
                return form(parts)
        if hasattr(value, "world_size") and hasattr(value, "rank"):
            parts = [getattr(value, key, None) for key in Workspace.__struct_fields__]
            return Workspace(*parts)
        raise UsageError(
            f"{name} is a {type(value).__name__}, which cannot be saved; allowed: "
            "tensors, numbers, text, lists, tuples and the contract's types"
        )

    def _tensor(self, tensor: Tensor, name: str, shape_only: bool) -> Stored | View | Empty:
        shape = list(tensor.shape)
        if shape_only:
            return Empty(shape, str(tensor.dtype).removeprefix("torch."))
        copy = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        if self._views and tensor.is_contiguous():
            key = (tensor.data_ptr(), tensor.dtype, tensor.numel())
            other = self._at.setdefault(key, name)
            if other != name and same_bits(self.tensors[other].view(copy.shape), copy):
                return View(other, shape)
        self.tensors[name] = copy
        if tensor.is_contiguous():
            return Stored(name)
        self._spread += _bytes(shape, tensor.stride(), tensor.dtype)
        return Stored(name, list(tensor.stride()))

    def check(self) -> None:
        """UsageError where strides leave such gaps that the values could not be read again."""
        if self._spread > _room(self.tensors.values()):
            raise UsageError(f"strides spread its tensors over {self._spread:,} bytes")


def _room(tensors: Iterable[Tensor]) -> int:
    """Bytes that tensors may take up, gaps included, once they are read."""
    return (16 << 20) + 16 * sum(tensor.nbytes for tensor in tensors)


def _bytes(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> int:
    """From a tensor's first element to behind its last."""
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return (last + 1) * dtype.itemsize if all(shape) else 0


class Reader:
    """Values from metadata and tensors.

    Raises:
        LookupError, TypeError, ValueError, ArithmeticError, RuntimeError: metadata that says what
            cannot be.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._left = dict(tensors)
        self._read: dict[str, Tensor] = {}
        self._room = _room(tensors.values())

    def value(self, shown: Value) -> Any:
        match shown:
            case Number(hexadecimal):
                return float.fromhex(hexadecimal)
            case Items(kind, items):
                values = [self.value(item) for item in items]
                return values if kind == "list" else tuple(values)
            case Workspace():
                return BeamAllReduceWorkspace(device_group=None, **msgspec.structs.asdict(shown))  # type: ignore[arg-type]
            case Stored():
                return self._stored(shown)
            case View(name, shape):
                return self._read[name].view(shape)
            case Empty(shape, name):
                dtype = getattr(torch, name)
                self._take(dtype.itemsize * prod(shape))
                return torch.empty(shape, dtype=dtype)
        for form, known in _CARRIERS:
            if isinstance(shown, form):
                return known(**{key: self.value(part) for key, part in shown.parts.items()})
        return shown

    def _stored(self, shown: Stored) -> Tensor:
        if shown.name not in self._left:
            raise LookupError(f"no tensor {shown.name}, or one that is used twice")
        tensor = self._left.pop(shown.name)
        if shown.strides is not None:
            self._take(_bytes(tensor.shape, shown.strides, tensor.dtype))
            tensor = _strided(tensor, shown.strides)
        self._read[shown.name] = tensor
        return tensor

    def _take(self, size: int) -> None:
        self._room -= size
        if self._room < 0:
            raise ValueError(f"tensors spread over {size:,} bytes")

    def finish(self) -> None:
        """ValueError where there are tensors that no value refers to."""
        if self._left:
            raise ValueError(f"nothing refers to tensor {next(iter(self._left))}")


def _strided(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """The tensor with these strides, values kept."""
    once = tensor
    for dim, (size, stride) in enumerate(zip(tensor.shape, strides, strict=True)):
        if stride == 0 and size > 1:
            once = once.narrow(dim, 0, 1)
    made = torch.empty_strided(once.shape, tuple(strides), dtype=tensor.dtype)
    return made.copy_(once).expand(tensor.shape)
