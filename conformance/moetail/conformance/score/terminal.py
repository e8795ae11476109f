"""The table of mutants and variants as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moetail.conformance.run.results import count
from moetail.conformance.score.table import Table as MutantsTable

__all__ = ["mutants_tables"]


def mutants_tables(table: MutantsTable) -> Iterator[Any]:
    """The catalogue's verdicts: what is printed, part by part."""
    from rich.table import Table

    if table.mutants:
        shown = Table(title="mutants: each breaks one rule", title_justify="left")
        for name in ("mutant", "breaks", "killed by", "exposed", "smallest case"):
            shown.add_column(name, overflow="fold", no_wrap=name in ("breaks", "killed by"))
        for row in table.mutants:
            style = "green" if row.right else "bold red"
            named = row.error or row.first or "SURVIVED"
            exposed = "" if row.exposure is None else f"{100 * row.exposure:.0f}%"
            shown.add_row(row.id, row.expected, f"[{style}]{named}[/]", exposed, row.case)
        yield shown
    if table.variants:
        shown = Table(title="variants: legal, but different", title_justify="left")
        for name in ("variant", "verdict", "elements judged", "rejected case"):
            shown.add_column(name, overflow="fold")
        for row in table.variants:
            accepted = (
                "[green]accepted[/]" if row.right else f"[bold red]{row.first or row.error}[/]"
            )
            shown.add_row(row.id, accepted, f"{row.judged:,}", f"{row.case} {row.found}".strip())
        yield shown
    killed = sum(row.killed for row in table.mutants)
    right = sum(row.right for row in table.mutants)
    alarms = len(table.false_alarms)
    yield (
        f"{killed} of {count(len(table.mutants), 'mutant')} killed, "
        f"{right} by the right rule first; "
        f"{alarms} false {'alarm' if alarms == 1 else 'alarms'} among "
        f"{count(len(table.variants), 'variant')}, on {table.judged:,} elements; "
        f"{table.seconds:.0f} s"
    )
