"""Other people's code under the contract's names, chosen by name: ``moetail check vllm``.

An adapter is a module that provides what maps onto an operation, and beside it:

    VERSIONS      what was found, by name: it goes into the report
    NOT_MAPPED    operation -> why nothing of theirs maps onto it

It imports no more of the other package than the functions need, and raises UsageError, which says
what to install, where the package is not there. A function raises NotMapped for legal arguments
that the code behind it does not take: such a case is not judged, and the report says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["ADAPTERS", "NotMapped", "not_mapped", "versions"]

ADAPTERS: dict[str, str] = {
    "vllm": "moetail.conformance.adapters.vllm",
    "flashinfer": "moetail.conformance.adapters.flashinfer",
}
"""Module of each adapter by the name that it is chosen by."""


class NotMapped(Exception):
    """Legal arguments that the other package's code is not meant for; the message says which.

    From an adapter this is no refusal, which would break a rule: the case is not judged. Arguments
    that are not legal must be refused by another exception before.
    """


def versions(implementation: Any) -> Mapping[str, str]:
    """Versions of the packages behind an implementation; empty where it is no adapter."""
    found: Mapping[str, str] = getattr(implementation, "VERSIONS", {})
    return found


def not_mapped(implementation: Any) -> Mapping[str, str]:
    """Why operations are not provided, by their names; empty where it is no adapter."""
    found: Mapping[str, str] = getattr(implementation, "NOT_MAPPED", {})
    return found
