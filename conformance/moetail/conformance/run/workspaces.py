"""The workspaces of operation 7: made, kept between calls, and observed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moetail.conformance.implementation import Implementation, load
from moetail.reference import BeamAllReduceWorkspace
from moetail.reference.operations import all_gather

__all__ = [
    "FIELDS",
    "VIRTUAL_DEADLINE",
    "CountingGather",
    "Unsupported",
    "Workspaces",
    "describe_workspace",
    "makes_virtual",
    "real",
    "virtual",
]

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

VIRTUAL_DEADLINE = 5.0
"""Seconds that a virtual rank's call waits for the others, where its workspace has a deadline."""

# Of every group of ranks so many workspaces are kept, for at least so many tokens: ours then take
# 34 MB each at the widest H.
_MOST_KEPT = 8
_LEAST_TOKENS = 512

_ASSIGNED = (
    "all_gather",
    "moe_gather_oneshot_max_tokens",
    "moe_gather_separate_norm_min_tokens",
)


class Unsupported(Exception):
    """What was asked for cannot be tried on this implementation; the message says why."""


class CountingGather:
    """The ``all_gather`` hook of a workspace, counted.

    Args:
        own: the hook that the workspace came with.
        distributed: without one, whether torch.distributed's collective serves.

    Attributes:
        calls: how often it was called.
        missing: whether it was called where nothing serves.
    """

    def __init__(self, own: Callable[..., Any] | None, distributed: bool = True) -> None:
        self.calls = 0
        self.missing = False
        self._collective = own or (all_gather() if distributed else None)

    def __call__(self, output: Tensor, source: Tensor, group: Any = None) -> None:
        self.calls += 1
        if self._collective is None:
            self.missing = True
            raise RuntimeError("the workspace has no all_gather")
        self._collective(output, source, group=group)


Make = Callable[[int, int], list[Any]]
"""From hidden size and max_tokens to the workspaces of this process's ranks."""


def real(implementation: Implementation, group: Any) -> Make:
    """The workspace that the implementation creates on this rank of a process group."""

    def make(hidden: int, max_tokens: int) -> list[Any]:
        factory: Any = getattr(implementation.target, "BeamAllReduceWorkspace", None)
        if factory is None:
            factory = BeamAllReduceWorkspace  # the reference's serves who brings none
        workspace = factory.create(group, hidden, max_tokens, torch.bfloat16)
        if workspace is None:
            raise RuntimeError(
                f"BeamAllReduceWorkspace.create returned None for {group.size()} ranks, "
                f"hidden size {hidden}, BF16: the implementation does not support this machine"
            )
        return [workspace]

    return make


def makes_virtual(implementation: Implementation) -> bool:
    """Whether the implementation's workspace brings ``virtual``."""
    factory = getattr(implementation.target, "BeamAllReduceWorkspace", None)
    return callable(getattr(factory, "virtual", None))


def virtual(implementation: Implementation, ranks: int, device: torch.device) -> Make:
    """The workspaces of all ranks, which this process holds.

    Making them raises :class:`Unsupported` where the implementation does.
    """

    def make(hidden: int, max_tokens: int) -> list[Any]:
        factory: Any = implementation.get("BeamAllReduceWorkspace")
        asked = f"BeamAllReduceWorkspace.virtual of {ranks} ranks"
        try:
            made = list(factory.virtual(ranks, hidden, max_tokens, device))
        except Exception as error:
            raise Unsupported(f"{asked} raised {type(error).__name__}: {error}") from error
        if len(made) != ranks:
            raise Unsupported(f"{asked} returned {len(made)} workspaces")
        for workspace in made:
            if hasattr(workspace, "deadline_s"):
                workspace.deadline_s = VIRTUAL_DEADLINE
        return made

    return make


@dataclass
class _Made:
    """Workspaces and the fields that they came with."""

    workspaces: list[Any]
    max_tokens: int
    fields: list[dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.fields = [
            {name: getattr(workspace, name) for name in _ASSIGNED if hasattr(workspace, name)}
            for workspace in self.workspaces
        ]

    def restore(self) -> None:
        """Undo what the calls assigned."""
        for workspace, fields in zip(self.workspaces, self.fields, strict=True):
            for name, value in fields.items():
                setattr(workspace, name, value)


@dataclass
class _Shelf:
    """What is kept for one group of ranks, by hidden size, the longest unused first."""

    implementation: str
    made: OrderedDict[int, _Made] = field(default_factory=OrderedDict)


_SHELVES: dict[Hashable, _Shelf] = {}


class Workspaces:
    """The workspaces for all calls of one execution, one for each hidden size.

    Making them may cost a hundred times what a call does (memory that all ranks map), so that they
    can be kept for later executions of this process. Making is a collective: what is kept and what
    is dropped follows from the executions of that very group alone, which all its ranks share.

    Args:
        make: makes them.
        implementation: its name; others' workspaces are dropped.
        group: what tells groups of ranks apart.
        wanted: for each call the hidden size, ``max_tokens``, and whether it needs a new one.
        keep: take kept ones and keep new ones, except where a call needs a new one.
    """

    def __init__(
        self,
        make: Make,
        implementation: str,
        group: Hashable,
        wanted: list[tuple[int, int, bool]],
        keep: bool,
    ) -> None:
        self._make = make
        self._implementation = implementation
        self._group = group
        self._wanted = wanted
        self._keep = keep
        self._used: dict[int, _Made] = {}

    def get(
        self, hidden: int, thresholds: tuple[int, int | None] | None = None
    ) -> list[tuple[Any, Callable[..., Any] | None]]:
        """Each rank's workspace, with the thresholds set, and the hook that it came with."""
        if hidden not in self._used:
            here = [(tokens, new) for size, tokens, new in self._wanted if size == hidden]
            keep = self._keep and not any(new for _, new in here)
            make = self._kept if keep else self._fresh
            self._used[hidden] = make(hidden, max(tokens for tokens, _ in here))
        made = self._used[hidden]
        if thresholds is not None:
            for workspace in made.workspaces:
                (
                    workspace.moe_gather_oneshot_max_tokens,
                    workspace.moe_gather_separate_norm_min_tokens,
                ) = thresholds
        return [
            (workspace, fields.get("all_gather"))
            for workspace, fields in zip(made.workspaces, made.fields, strict=True)
        ]

    def drop(self) -> None:
        """Keep nothing that these calls used: one failed, and may have left anything there."""
        shelf = _SHELVES.get(self._group)
        for hidden, made in self._used.items():
            if shelf is not None and shelf.made.get(hidden) is made:
                del shelf.made[hidden]

    def _fresh(self, hidden: int, tokens: int) -> _Made:
        return _Made(self._make(hidden, tokens), tokens)

    def _kept(self, hidden: int, tokens: int) -> _Made:
        shelf = _SHELVES.get(self._group)
        if shelf is None or shelf.implementation != self._implementation:
            shelf = _SHELVES[self._group] = _Shelf(self._implementation)
        made = shelf.made.pop(hidden, None)
        if made is not None and made.max_tokens < tokens:
            made = None
        if made is None:
            while len(shelf.made) >= _MOST_KEPT:
                shelf.made.popitem(last=False)
            # The next power of two, so that a few tokens more do not need another one.
            made = self._fresh(hidden, max(_LEAST_TOKENS, 1 << (tokens - 1).bit_length()))
        made.restore()
        shelf.made[hidden] = made
        return made


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
