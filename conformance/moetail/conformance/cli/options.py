"""The declared options as parameters of a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from moetail.conformance.run.options import OPTIONS, Option

__all__ = ["takes"]

_Command = TypeVar("_Command", bound=Callable[..., None])


def takes(*keys: str, **defaults: str) -> Callable[[_Command], _Command]:
    """Give a command, which gathers them as keywords, these options; "impl" is an argument.

    Args:
        keys: of ``OPTIONS``.
        defaults: by key, where the command's differs.
    """

    def give(command: _Command) -> _Command:
        own = inspect.signature(command, eval_str=True).parameters.values()
        kept = [
            item.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for item in own
            if item.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        declared = [_parameter(OPTIONS[key], defaults.get(key)) for key in keys]
        # typer reads a command's parameters from its signature.
        command.__signature__ = inspect.Signature([*declared, *kept])  # type: ignore[attr-defined]
        return command

    return give


def _parameter(option: Option, default: str | None) -> inspect.Parameter:
    kind: Any = type(option.default)
    if option.default is None:
        kind = str | None
    elif isinstance(option.default, tuple):
        kind = list[str]
    shown: Any
    if option.key == "impl":
        shown = typer.Argument(metavar=option.metavar, help=option.help)
    else:
        shown = typer.Option(f"--{option.name}", metavar=option.metavar or None, help=option.help)
    value = option.default if default is None else default
    return inspect.Parameter(
        option.key,
        inspect.Parameter.KEYWORD_ONLY,
        default=list(value) if isinstance(value, tuple) else value,
        annotation=Annotated[kind, shown],
    )
