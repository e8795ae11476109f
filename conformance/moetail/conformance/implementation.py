"""Find the implementation that is to be judged.

An implementation is any object with a subset of the operations of :class:`moetail.spec.MoETail`: a
module, a .py file, or an attribute of a module. It is named by text, because every rank process
loads its own.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from moetail.conformance.adapters import ADAPTERS
from moetail.spec import OPERATIONS, operation

__all__ = ["Implementation", "UsageError", "load"]

BUILT_IN = {"reference": "moetail.reference", "kernels": "moetail.kernels", **ADAPTERS}


class UsageError(Exception):
    """What the user asked for cannot be done; the message says what is allowed."""


@dataclass(frozen=True)
class Implementation:
    """A loaded implementation.

    Attributes:
        spec: the text that :func:`load` takes, absolute where it is a path, so that any process
            finds the same one.
        target: the object that holds the operations.
    """

    spec: str
    target: Any

    def provides(self, name: str) -> bool:
        """Whether the operation of that name is there to be judged."""
        found = getattr(self.target, operation(name).name, None)
        return callable(getattr(found, "create", None) or found)

    @property
    def provided(self) -> tuple[str, ...]:
        """Names of the operations it provides, in the contract's order."""
        return tuple(item.name for item in OPERATIONS if self.provides(item.name))

    def get(self, name: str) -> Callable[..., Any]:
        """The operation's callable (for the workspace, the object with ``create``)."""
        found: Callable[..., Any] = getattr(self.target, operation(name).name)
        return found


def _load_file(path: Path) -> ModuleType:
    # A synthetic name: the file may be called like a package that it imports. What lies beside it
    # may be imported too, but hides nothing: its folder comes last.
    name = "_moetail_implementation_" + hashlib.sha256(str(path).encode()).hexdigest()[:12]
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise UsageError(f"IMPL: {path} is not a Python file; allowed: a .py file or a module")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _is_path(spec: str) -> bool:
    return spec.endswith(".py") or "/" in spec or "\\" in spec


@cache
def load(spec: str) -> Implementation:
    """Load an implementation.

    Args:
        spec: "reference", "kernels", an adapter's name, a module ("my_package.tail"), an attribute
            of one ("my_package.tail:Fused"), or a path to a .py file.

    Raises:
        UsageError: nothing of that name, or it cannot be imported; the cause is chained.
    """
    if _is_path(spec):
        path = Path(spec).expanduser().resolve()
        if not path.is_file():
            raise UsageError(f"IMPL: there is no file {path}; allowed: a .py file or a module")
        spec = str(path)

    name, _, attribute = BUILT_IN.get(spec, spec).partition(":")
    try:
        target: Any = _load_file(Path(spec)) if _is_path(spec) else importlib.import_module(name)
        for part in attribute.split(".") if attribute and not _is_path(spec) else ():
            target = getattr(target, part)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        cause = f"{type(error).__name__}: {error}"
        raise UsageError(
            f"IMPL: {spec or repr(spec)} cannot be loaded ({cause}); allowed: "
            f"{', '.join(BUILT_IN)}, a module, module:attribute, or a .py file"
        ) from error
    return Implementation(spec, target)
