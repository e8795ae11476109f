"""The command line: ``moetail check`` and its kin, a module for those that belong together."""

from __future__ import annotations

import io
import os
import sys
import traceback
from typing import NoReturn

__all__ = ["main"]

_USAGE = 2


def main(arguments: list[str] | None = None) -> NoReturn:
    """Entry point of the ``moetail`` command.

    Whatever goes wrong beside a verdict ends with 2: 1 only ever means that a rule is violated.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files may be no text at all
    try:
        import moetail.conformance.extra  # noqa: F401
    except ModuleNotFoundError as error:
        print(f"moetail: {error}", file=sys.stderr)
        sys.exit(_USAGE)
    # Not before: the modules beneath import what may be missing.
    import typer

    from moetail.conformance.cli.app import WrongUsage, app
    from moetail.conformance.implementation import UsageError

    try:
        code = app(args=arguments, prog_name="moetail", standalone_mode=False) or 0
    except UsageError as error:
        code = _wrong(str(error))
    except WrongUsage as error:
        code = _wrong(error.format_message())  # type: ignore[attr-defined]
    except typer.Abort:  # what typer makes of Ctrl-C
        code = _wrong("interrupted")
    except Exception:
        code = _wrong(f"could not go on\n{traceback.format_exc()}")
    sys.exit(_flushed(code))


def _wrong(text: str) -> int:
    from moetail.conformance.run.results import harmless

    if text:  # nothing where the help was shown instead
        print(f"moetail: {harmless(text.strip())}", file=sys.stderr)
    return _USAGE


def _flushed(code: int) -> int:
    """The exit code, also where nobody reads what is printed, or its disk is full."""
    try:
        sys.stdout.flush()
    except OSError as error:
        # Python would flush again at its end, and change the exit code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"moetail: standard output: {error.strerror}", file=sys.stderr)
    return code
