"""The tensors of a call or of a result, wherever they lie in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ["mapped", "tensors_in"]


def _parts(value: Any) -> list[tuple[str, Any]]:
    """What a container holds, each with the end of its dotted name; nothing of anything else."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [item.name for item in dataclasses.fields(value)]
        return [(f".{name}", getattr(value, name)) for name in names]
    if isinstance(value, Mapping):
        return [(f".{name}", part) for name, part in value.items()]
    if isinstance(value, (list, tuple)):
        return [(f"[{index}]", part) for index, part in enumerate(value)]
    return []


def tensors_in(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in dataclasses, mappings, lists and tuples, with a dotted name."""
    if isinstance(value, Tensor):
        yield name, value
    for end, part in _parts(value):
        yield from tensors_in(part, f"{name}{end}".removeprefix("."))


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """``value`` with ``change`` made of every tensor, in the order of :func:`tensors_in`.

    Containers are copied where something in them changes; the others are the same object.
    """
    if isinstance(value, Tensor):
        return change(value)
    old = _parts(value)
    new = [mapped(part, change) for _, part in old]
    if all(made is part for made, (_, part) in zip(new, old, strict=True)):
        return value
    if isinstance(value, Mapping):
        return dict(zip(value, new, strict=True))
    if isinstance(value, (list, tuple)):
        return type(value)(new)
    names = (end.removeprefix(".") for end, _ in old)
    return dataclasses.replace(value, **dict(zip(names, new, strict=True)))
