"""The command line: ``moetail check`` and its kin, a module for those that belong together."""

from __future__ import annotations

import sys
from typing import Any

import typer

from moetail.conformance.cli.catalogue import mutants
from moetail.conformance.cli.contract import cases, definitions, init, rules
from moetail.conformance.cli.verdict import check, judge
from moetail.conformance.implementation import UsageError

__all__ = ["app", "main"]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Does a kernel obey the contract of the MoE tail, and if not, which rule does it break?",
)
for _command in (check, init, rules, cases, mutants, judge, definitions):
    app.command()(_command)

_USAGE = 2


def main(arguments: list[str] | None = None) -> Any:
    """Entry point of the ``moetail`` command."""
    try:
        return app(args=arguments, standalone_mode=True)
    except UsageError as error:
        print(f"moetail: {error}", file=sys.stderr)
        sys.exit(_USAGE)
