"""Importing this fails, in one line, where only moetail itself and torch are installed."""

from __future__ import annotations

from importlib.util import find_spec

# What the modules above import, by the names that they import.
NEEDED = ("jinja2", "msgspec", "numpy", "rich", "safetensors", "typer")

_missing = [name for name in NEEDED if find_spec(name) is None]
if _missing:
    raise ModuleNotFoundError(
        f"{', '.join(_missing)}: not installed; allowed: pip install 'moetail[conformance]'",
        name=_missing[0],
    )
