"""What behaviours share: a hook around every operation, and arguments by role."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from moetail.reference import Reference
from moetail.spec import OPERATIONS, operation

__all__ = ["Arguments", "Around", "with_rows", "with_tensor"]

Arguments = dict[str, Any]


class Around(Reference):
    """The reference with :meth:`around` called about every operation that is a function."""

    def around(self, name: str, call: Arguments, compute: Callable[[Arguments], Any]) -> Any:
        """``compute(call)`` is what the reference does; ``call`` has every argument by name."""
        return compute(call)


def _hooked(name: str) -> Callable[..., Any]:
    signature = inspect.signature(getattr(Reference, name))

    def method(self: Around, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        call = dict(bound.arguments)
        del call["self"]
        inner = getattr(super(Around, self), name)
        return self.around(name, call, lambda changed: inner(**changed))

    return method


for _item in OPERATIONS:
    if inspect.isfunction(getattr(Reference, _item.name)):
        setattr(Around, _item.name, _hooked(_item.name))


def with_tensor(
    name: str, call: Arguments, role: str, change: Callable[[Tensor], Tensor]
) -> Arguments:
    """The call of an operation with the tensor of that role changed, if it has one."""
    argument = operation(name).find(role)
    value = argument.of(call) if argument else None
    return argument.put(call, change(value)) if argument and isinstance(value, Tensor) else call


def with_rows(name: str, call: Arguments, change: Callable[[Tensor], Tensor]) -> Arguments:
    """The call with its routed rows changed, finalized or not, if it has any that are tensors."""
    return with_tensor(name, with_tensor(name, call, "rows", change), "finalized", change)
