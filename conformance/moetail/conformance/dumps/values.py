"""A call's values as JSON beside named tensors, and back."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from moetail.conformance.implementation import UsageError
from moetail.conformance.run.call import same_bits
from moetail.reference import BeamAllReduceWorkspace
from moetail.spec import MoEOutput, UnfinalizedMoEOutput

__all__ = ["Reader", "Saved"]

_WORKSPACE_FIELDS = (
    "world_size",
    "rank",
    "hidden_size",
    "max_tokens",
    "moe_gather_oneshot_max_tokens",
    "moe_gather_separate_norm_min_tokens",
)
_CLASSES = {"UnfinalizedMoEOutput": UnfinalizedMoEOutput, "MoEOutput": MoEOutput}


class Saved:
    """Values as JSON, and their tensors by name, copied to the CPU.

    A tensor may be stored as a view of an earlier one that it shares its memory with, where that
    matters (``views``): the copy that is loaded then shares memory again.
    """

    def __init__(self, *, views: bool = False) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._views = views
        self._at: dict[tuple[int, torch.dtype, int], str] = {}

    def add(self, value: Any, name: str, *, shape_only: bool = False) -> Any:
        """``value`` as JSON; UsageError where it is none of what calls are made of."""
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, Tensor):
            return self._tensor(value, name, shape_only)
        if isinstance(value, Integral):
            return int(value)
        if isinstance(value, Real):
            return {"float": float(value).hex()}
        if isinstance(value, (list, tuple)):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [self.add(item, f"{name}[{i}]") for i, item in enumerate(value)]}
        if hasattr(value, "world_size") and hasattr(value, "rank"):
            parts = {key: getattr(value, key, None) for key in _WORKSPACE_FIELDS}
            return {"workspace": {key: self.add(one, key) for key, one in parts.items()}}
        for kind, known in _CLASSES.items():
            names = [item.name for item in fields(known)]
            if is_dataclass(value) and all(hasattr(value, key) for key in names):
                return {
                    kind: {key: self.add(getattr(value, key), f"{name}.{key}") for key in names}
                }
        raise UsageError(
            f"capture: {name} is a {type(value).__name__}, which cannot be saved; allowed: "
            "tensors, numbers, text, lists, tuples and the contract's types"
        )

    def _tensor(self, tensor: Tensor, name: str, shape_only: bool) -> dict[str, Any]:
        if shape_only:
            return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
        copy = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        if self._views and tensor.is_contiguous():
            key = (tensor.data_ptr(), tensor.dtype, tensor.numel())
            other = self._at.setdefault(key, name)
            if other != name and same_bits(self.tensors[other].view(copy.shape), copy):
                return {"view": other, "shape": list(tensor.shape)}
        self.tensors[name] = copy
        shown: dict[str, Any] = {"tensor": name, "crc32": _checksum(copy)}
        if not tensor.is_contiguous():
            shown["strides"] = list(tensor.stride())
        return shown


def _checksum(tensor: Tensor) -> int:
    flat = tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0)
    return zlib.crc32(flat.numpy().data) if tensor.numel() else 0


def _strided(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """The tensor with these strides, values kept."""
    once = tensor
    for dim, (size, stride) in enumerate(zip(tensor.shape, strides, strict=True)):
        if stride == 0 and size > 1:
            once = once.narrow(dim, 0, 1)
    made = torch.empty_strided(once.shape, tuple(strides), dtype=tensor.dtype)
    return made.copy_(once).expand(tensor.shape)


class Damaged(Exception):
    """A tensor is missing, or its values are not those that were saved."""

    def __init__(self, found: str, allowed: str) -> None:
        super().__init__(found)
        self.found, self.allowed = found, allowed


class Reader:
    """Values from JSON and tensors.

    Raises:
        Damaged: as it says.
        KeyError, TypeError, ValueError, AttributeError, RuntimeError: JSON of another form.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def value(self, shown: Any, name: str) -> Any:
        if shown is None or isinstance(shown, (bool, str, int)):
            return shown
        if "tensor" in shown:
            return self._tensor(shown, name)
        if "view" in shown:
            return self.tensors[shown["view"]].view(shown["shape"])
        if "shape" in shown:
            return torch.zeros(shown["shape"], dtype=getattr(torch, shown["dtype"]))
        ((kind, inner),) = shown.items()
        if kind == "float":
            return float.fromhex(inner)
        if kind in ("list", "tuple"):
            items = [self.value(item, f"{name}[{i}]") for i, item in enumerate(inner)]
            return items if kind == "list" else tuple(items)
        parts = {key: self.value(item, f"{name}.{key}") for key, item in inner.items()}
        if kind == "workspace":
            return BeamAllReduceWorkspace(device_group=None, **parts)  # type: ignore[arg-type]
        return _CLASSES[kind](**parts)

    def _tensor(self, shown: Mapping[str, Any], name: str) -> Tensor:
        key = shown["tensor"]
        if key not in self.tensors:
            raise Damaged(f"no tensor {key}", f"the tensor that {name} refers to")
        tensor = self.tensors[key]
        found = _checksum(tensor)
        if found != shown["crc32"]:
            raise Damaged(
                f"damaged values in {name} (checksum {found:#010x})",
                f"values with checksum {shown['crc32']:#010x}",
            )
        return _strided(tensor, shown["strides"]) if "strides" in shown else tensor
