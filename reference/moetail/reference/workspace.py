"""What the ranks of a group share (operation 7), on torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from moetail.spec import ContractError
from moetail.spec.checks import check_workspace_request

__all__ = ["BeamAllReduceWorkspace"]


@dataclass
class BeamAllReduceWorkspace:
    """A workspace of the reference: it holds no buffers, so it serves any sequence of calls.

    The fields are those of :class:`moetail.spec.Workspace` and may be assigned. The thresholds
    here only choose between strategies that give the same bits; they carry no measurement.
    """

    world_size: int
    rank: int
    hidden_size: int
    max_tokens: int
    device_group: dist.ProcessGroup
    all_gather: Callable[..., Any] | None = None
    moe_gather_oneshot_max_tokens: int = 64
    moe_gather_separate_norm_min_tokens: int | None = None

    @classmethod
    def create(
        cls,
        group: dist.ProcessGroup | None,
        hidden_size: int,
        max_tokens: int,
        dtype: torch.dtype,
    ) -> BeamAllReduceWorkspace | None:
        """See :meth:`moetail.spec.api.WorkspaceFactory.create`; group None is the default group.

        Raises:
            ContractError: a size that no workspace can have, or sizes or dtypes that differ between
                the ranks, on all ranks alike (DOMAIN-1).
        """
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if group is None or dist.get_rank(group) < 0:
            check_workspace_request(hidden_size, max_tokens)
            return None
        # Agreement comes before any refusal: the other ranks cannot know what this one must refuse,
        # and would wait for it.
        requests: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(requests, (hidden_size, max_tokens, str(dtype)), group=group)
        if any(request != requests[0] for request in requests):
            raise ContractError(
                "DOMAIN-1",
                "hidden_size, max_tokens, dtype",
                f"{requests} on ranks 0 to {len(requests) - 1}",
                "the same on every rank",
            )
        check_workspace_request(hidden_size, max_tokens)
        if dtype is not torch.bfloat16:
            return None
        return cls(
            world_size=dist.get_world_size(group),
            rank=dist.get_rank(group),
            hidden_size=hidden_size,
            max_tokens=max_tokens,
            device_group=group,
        )
