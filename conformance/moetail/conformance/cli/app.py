"""The commands, gathered."""

from __future__ import annotations

from importlib.metadata import version as version_of
from typing import Annotated

import typer

from moetail.conformance.cli.catalogue import mutants
from moetail.conformance.cli.contract import cases, definitions, init, rules
from moetail.conformance.cli.verdict import check, judge

__all__ = ["WrongUsage", "app"]

# typer has a click of its own, or the installed one's: no other name of it is public.
WrongUsage: type[Exception] = typer.BadParameter.__bases__[0]
"""What typer raises for an option or argument that there is not, or of another kind."""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Does a kernel obey the contract of the MoE tail, and if not, which rule does it break?",
)
for _command in (check, init, rules, cases, mutants, judge, definitions):
    app.command()(_command)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"moetail {version_of('moetail')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None: ...
