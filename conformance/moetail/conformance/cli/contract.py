"""What the contract says and gives: its rules and cases, a file to fill, definitions."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from moetail.conformance.cli.options import takes
from moetail.conformance.implementation import UsageError

__all__ = ["cases", "definitions", "init", "rules"]


@takes("op")
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The .py file to write.")],
    **words: Any,
) -> None:
    """Write a template of a kernel's file, with the operations to fill.

    It runs at once: what is not filled is not provided, and so not judged.
    """
    from moetail.conformance.export.template import TODO, write_template
    from moetail.conformance.run.options import operations_named

    names = write_template(file, operations_named(words["op"]))
    typer.echo(f"{file}: {len(names)} to fill: {', '.join(names)}")
    again = shlex.join(["moetail", "check", str(file)])
    typer.echo(f"Fill one, take {TODO} off its name, and run: {again}")


def rules(
    rules: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ID]...", help="Show these whole: rules, or kinds such as ROUND."),
    ] = None,
) -> None:
    """The rules of the contract."""
    from moetail.conformance.report.terminal import rules_text
    from moetail.conformance.run.options import rules_named

    typer.echo(rules_text(rules_named(rules or ())))


@takes("op", "rule", "ranks", "profile", "seed")
def cases(**words: Any) -> None:
    """The cases that check would try: rule, operation and id, one a line."""
    from moetail.conformance.run.check import planned
    from moetail.conformance.run.options import make_plan, operations_named, rules_named
    from moetail.conformance.suite import checks
    from moetail.spec.rules import OPERATIONS

    operations, named = operations_named(words.pop("op")), rules_named(words.pop("rule"))
    every = tuple(item.name for item in OPERATIONS)
    number = 0
    plan = make_plan(**words)
    for item, trial in planned(checks(), plan, every, operations=operations, rules=named):
        typer.echo(f"{item.rule}\t{trial.operation}\t{trial.id}")
        number += 1
    if number == 0:
        typer.echo("no case fits what was asked for", err=True)
        raise typer.Exit(3)


def definitions(
    out: Annotated[Path, typer.Option(help="Folder of the trace set.")],
    model: Annotated[
        str, typer.Option(help="Whose dimensions and routing the workloads have.")
    ] = "deepseek-v3",
) -> None:
    """The operations as FlashInfer-Bench Definitions, with workloads."""
    from moetail.conformance.export.definitions import write_definitions

    torch.set_num_threads(1)
    folder = out.expanduser().resolve()
    try:
        written = write_definitions(folder, model=model, after=typer.echo)
    except OSError as error:
        raise UsageError(f"--out: {folder}: {error.strerror}; allowed: a folder") from None
    typer.echo(f"{len(written)} definitions with their workloads: {folder}")
