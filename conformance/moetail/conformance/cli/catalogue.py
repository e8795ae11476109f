"""``moetail mutants``: the suite judged by the catalogue."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from moetail.conformance.cli.folder import make_folder
from moetail.conformance.cli.options import takes
from moetail.conformance.cli.progress import Progress
from moetail.conformance.cli.verdict import complain, printing, say
from moetail.conformance.implementation import UsageError

__all__ = ["mutants"]


@takes("profile", "seed", "ranks", ranks="1,2,3")
def mutants(
    only: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]...", help="Only these mutants or variants.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes, each with its ranks.")] = 2,
    report: Annotated[
        Path | None, typer.Option(help="Write mutants.json into this folder.")
    ] = None,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Also what the criteria of public tests would have said."),
    ] = False,
    into: Annotated[
        Path | None,
        typer.Option(help="With --compare: put the table into this Markdown file, at its markers."),
    ] = None,
    **words: Any,
) -> None:
    """Put the catalogue to the suite: broken implementations and legal variants of the reference.

    Exit code: 0 where every mutant was killed by its rule first and every variant accepted, else 1.
    """
    from moetail.conformance.catalogue import MUTANTS, VARIANTS
    from moetail.conformance.report import markdown, write
    from moetail.conformance.run.options import make_plan
    from moetail.conformance.run.results import environment
    from moetail.conformance.score.table import run_catalogue
    from moetail.conformance.score.terminal import mutants_tables

    known = [item.id for item in MUTANTS] + [item.id for item in VARIANTS]
    unknown = [name for name in only or [] if name not in known]
    if unknown:
        raise UsageError(f"ID: {unknown[0]!r}; allowed: {', '.join(known)}")
    plan = make_plan(**words)
    folder = make_folder("--report", report)
    if into is not None:
        if not compare:
            raise UsageError("--into: given without --compare, whose table it is for")
        markdown.find(into)
    with Progress() as progress:
        table = run_catalogue(
            plan,
            workers=workers,
            only=only or (),
            progress=lambda row, done, total: progress.show(done, total, row.id),
        )
    with printing(table.exit_code) as console:
        for part in mutants_tables(table, console.width):
            console.print(part)
        if folder is not None:
            content = {
                "environment": environment("cpu"),
                "plan": plan.shown,
                "seconds": round(table.seconds, 1),
                "rows": [asdict(row) for row in table.rows],
            }
            complain([write(folder / "mutants.json", json.dumps(content, indent=2) + "\n")])
            say(f"Report: {folder}")
        if compare:
            from moetail.conformance.diagnosis import DEVIATIONS
            from moetail.conformance.score.compare import compare as compare_criteria
            from moetail.conformance.score.compare import markdown as comparison

            # Those that change values, which is what a tolerance can look at.
            of_values = {item.id for item in DEVIATIONS}
            lines = compare_criteria(plan.seed)
            missed = sum(not row.killed for row in table.mutants if row.id in of_values)
            text = comparison(lines, None if only else (missed, len(table.false_alarms)))
            say(text)
            if into is not None:
                markdown.replace(into, text)
