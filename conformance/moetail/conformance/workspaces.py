"""What is observed of a workspace (operation 7), on every rank."""

from __future__ import annotations

from typing import Any

import torch

from moetail.conformance.implementation import load

__all__ = ["FIELDS", "describe_workspace"]

FIELDS = (
    "world_size",
    "rank",
    "hidden_size",
    "max_tokens",
    "device_group",
    "all_gather",
    "moe_gather_oneshot_max_tokens",
    "moe_gather_separate_norm_min_tokens",
)


def describe_workspace(
    group: Any, rank: int, implementation: str, hidden_size: int, max_tokens: int, dtype: str
) -> dict[str, Any]:
    """Create a workspace on this rank; its fields, or ``{"none": True}``, or ``{"raised": ...}``.

    Fields that are not there are left out; those that cannot travel are told by their type.
    """
    factory = load(implementation).get("BeamAllReduceWorkspace")
    create = factory.create  # type: ignore[attr-defined]
    try:
        made = create(group, hidden_size, max_tokens, getattr(torch, dtype))
    except Exception as error:
        return {"raised": f"{type(error).__name__}: {error}"}
    if made is None:
        return {"none": True}
    found: dict[str, Any] = {}
    for name in FIELDS:
        if hasattr(made, name):
            value = getattr(made, name)
            found[name] = value if isinstance(value, (int, type(None))) else type(value).__name__
    return found
