"""The text of a case: operation/source/sizes, then every option that is not as usual."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["OPTIONS", "read", "written"]

OPTIONS: Mapping[str, str] = {
    "seed": "seed",
    "ranks": "ranks",
    "layout": "layout",
    "weights": "weights",
    "capacity": "cap",
    "routed_scale": "scale",
    "post": "post",
    "post_eps": "posteps",
    "next": "next",
    "next_eps": "nexteps",
    "scales": "scales",
    "shared": "shared",
    "routed": "routed",
    "strategy": "strategy",
    "model": "model",
    "experts": "experts",
    "local": "local",
    "tile": "tile",
    "flat": "flat",
    "aliased": "aliased",
    "poison": "poison",
}
"""The id's name of each option, in the order in which an id lists them."""

_SIZES = {"tokens": "T", "top_k": "K", "hidden": "H"}
_FIELD_OF = {name: field for field, name in OPTIONS.items()}


def _number(value: float) -> str:
    return repr(float(value)).removesuffix(".0").replace("e+", "e")


def _flag(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError("yes or no")
    return text == "yes"


def _scales(text: str) -> tuple[float, float]:
    x_scale, r_scale = text.split("x")
    return float(x_scale), float(r_scale)


_READERS: Mapping[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "bool": _flag,
    "str": str,
    "str | None": str,
    "tuple[float, float] | None": _scales,
}


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, tuple):
        return "x".join(map(_number, value))
    return str(value)


def written(values: Mapping[str, Any]) -> str:
    """The id of a case with those fields, of which options that are as usual are left out."""
    sizes = "-".join(f"{letter}{values[name]}" for name, letter in _SIZES.items())
    options = [
        f"{short}:{_shown(values[name])}" for name, short in OPTIONS.items() if name in values
    ]
    parts = [values["operation"], values["source"], sizes, "+".join(options)]
    return "/".join(part for part in parts if part)


def read(text: str, kinds: Mapping[str, str]) -> dict[str, Any]:
    """The fields that an id names; ``kinds`` are their types as annotations spell them.

    Raises:
        ValueError: names the part that is wrong.
    """
    parts = text.strip().split("/")
    if not 3 <= len(parts) <= 4:
        raise ValueError(
            f"id: {text!r} must read operation/source/T..-K..-H.. or, with options, "
            "operation/source/T..-K..-H../option:value+option:value"
        )
    values: dict[str, Any] = {"operation": parts[0], "source": parts[1]}
    sizes = parts[2].split("-")
    if len(sizes) != 3:
        raise ValueError(f"sizes: {parts[2]!r} must read T..-K..-H..")
    for (name, letter), size in zip(_SIZES.items(), sizes, strict=True):
        if not (size[:1] == letter and size[1:].isdecimal()):
            raise ValueError(f"{name}: {size!r} must read {letter} and a number")
        values[name] = int(size[1:])
    for option in parts[3].split("+") if len(parts) == 4 else ():
        short, _, shown = option.partition(":")
        if short not in _FIELD_OF:
            raise ValueError(f"{short}: no such option; known: {', '.join(_FIELD_OF)}")
        name = _FIELD_OF[short]
        if name in values:
            raise ValueError(f"{short}: given twice")
        try:
            values[name] = _READERS[kinds[name]](shown)
        except ValueError as error:
            raise ValueError(f"{short}: cannot read {shown!r}: {error}") from None
    return values
