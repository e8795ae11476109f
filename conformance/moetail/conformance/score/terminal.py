"""The table of mutants and variants as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from moetail.conformance.report.terminal import folded
from moetail.conformance.run.results import count, harmless
from moetail.conformance.score.table import Table as MutantsTable

__all__ = ["mutants_tables"]


def mutants_tables(table: MutantsTable, width: int) -> Iterator[Any]:
    """The catalogue's verdicts: what is printed, part by part, for so many columns of text."""
    from rich.text import Text

    def verdict(right: bool, said: str) -> Text:
        return Text(harmless(said).partition("\n")[0], "green" if right else "bold red")

    names: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    if table.mutants:
        rows = [
            (
                row.id,
                row.expected,
                verdict(row.right, row.error or row.first or "SURVIVED"),
                "" if row.exposure is None else f"{100 * row.exposure:.0f}%",
                row.case,
            )
            for row in table.mutants
        ]
        names = ("mutant", "breaks", "killed by", "exposed", "smallest case")
        yield _fitting("mutants: each breaks one rule", names, rows, width)
    if table.variants:
        rows = [
            (
                row.id,
                verdict(row.right, "accepted" if row.right else row.first or row.error),
                f"{row.judged:,}",
            )
            for row in table.variants
        ]
        names = ("variant", "verdict", "elements judged")
        yield _fitting("variants: legal, but different", names, rows, width)
        for row in table.variants:
            if not row.right:
                yield Text(folded(f"{row.id}: {row.case} {row.found} {row.error}", width, indent=2))
    killed = sum(row.killed for row in table.mutants)
    right = sum(row.right for row in table.mutants)
    alarms = len(table.false_alarms)
    summary = (
        f"{killed} of {count(len(table.mutants), 'mutant')} killed, "
        f"{right} by the right rule first; "
        f"{alarms} false {'alarm' if alarms == 1 else 'alarms'} among "
        f"{count(len(table.variants), 'variant')}, on {table.judged:,} elements; "
        f"{table.seconds:.0f} s"
    )
    yield Text(folded(summary, width))


def _fitting(title: str, names: Sequence[str], rows: Sequence[Sequence[Any]], width: int) -> Any:
    """A table of the first columns, as many as fit beside each other."""
    from rich.table import Table

    shown = Table(title=title, title_justify="left")
    left = width - 1
    for number, name in enumerate(names):
        needed = max(len(name), *(len(row[number]) for row in rows))
        left -= needed + 3
        if left < 0 and number:
            break
        shown.add_column(name, no_wrap=True)
    for row in rows:
        shown.add_row(*row[: len(shown.columns)])
    return shown
