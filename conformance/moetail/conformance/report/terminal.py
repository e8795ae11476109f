"""Results as text for a terminal."""

from __future__ import annotations

import io
import textwrap
from typing import Any

from moetail.conformance.run.check import TAIL
from moetail.conformance.run.results import (
    CONFORMS,
    NOT_DECIDED,
    NOT_JUDGED,
    NOT_PROVIDED,
    VIOLATES,
    Results,
    TrialResult,
    count,
)
from moetail.spec.rules import OPERATIONS, RULES, operation, rule

__all__ = [
    "matrix_table",
    "rules_text",
    "statement",
    "summary_text",
    "verdict_line",
    "violation_text",
]

_WIDE = 110
_MARKS = {CONFORMS: "ok", VIOLATES: "VIOLATES", NOT_JUDGED: "not judged", NOT_PROVIDED: "-"}
_STYLES = {CONFORMS: "green", VIOLATES: "bold red", NOT_JUDGED: "yellow", NOT_PROVIDED: "dim"}

TAIL_STATEMENT = "Whole tails on real layers and on arbitrary cases: every element is admissible."


def statement(rule_id: str) -> str:
    """What a rule says."""
    return TAIL_STATEMENT if rule_id == TAIL else rule(rule_id).statement


def matrix_table(results: Results, width: int) -> Any:
    """Rules by operations, for so many columns of text."""
    from rich.console import Group
    from rich.table import Table

    columns = [item for item in OPERATIONS if results.asked(item.name)]
    matrix = results.matrix()
    columns = [item for item in columns if any(item.name in row for row in matrix.values())]
    if width < _WIDE:
        # What is not provided is said below too, where it squeezes no other column.
        columns = [item for item in columns if item.name in results.provided] or columns
        matrix = {
            rule_id: row
            for rule_id, row in matrix.items()
            if any(item.name in row for item in columns)
        }
    table = Table()
    table.add_column("rule", no_wrap=True)
    for item in columns:
        table.add_column(item.short, justify="center")
    for rule_id, row in matrix.items():
        cells = []
        for item in columns:
            cell = row.get(item.name)
            if cell is None:
                cells.append("")
                continue
            cells.append(f"[{_STYLES[cell.status]}]{_MARKS[cell.status]}[/]")
        table.add_row(rule_id, *cells)
    legend = (
        "ok: conforms.  -: not provided.  not judged: nothing decided here.  "
        "empty: the rule does not apply."
    )
    return Group(f"{results.implementation}: rules by operations", table, legend)


def violation_text(result: TrialResult) -> str:
    """One violation, with all that its author needs to see it again."""
    lines = [
        f"{result.rule} violated by {result.operation}",
        *textwrap.wrap(
            statement(result.rule), 96, initial_indent="  rule:      ", subsequent_indent=" " * 13
        ),
        f"  case:      {result.case}",
        f"  found:     {result.found}",
    ]
    if result.diagnosis:
        lines.append(f"  diagnosis: {result.diagnosis}")
    lines.append(f"  repeat:    {result.repeat}")
    if result.trace:
        lines.append(textwrap.indent(result.trace.rstrip(), "  | "))
    return "\n".join(lines)


def verdict_line(results: Results) -> str:
    """The verdict and how much it rests on."""
    done = (
        f"{count(len(results.trials), 'case')}, {results.judged:,} elements judged, "
        f"{results.not_judged:,} elements not judged"
    )
    asked = [item for item in OPERATIONS if results.asked(item.name)]
    missing = [item.short for item in asked if item.name not in results.provided]
    tail = f"; not provided: {', '.join(missing)}" if missing else ""
    if results.verdict == NOT_JUDGED:
        return f"NOTHING WAS JUDGED: {results.implementation} ({done}{tail})"
    if results.verdict == CONFORMS:
        return f"CONFORMS: {results.implementation} ({done}{tail})"
    if results.verdict == NOT_DECIDED:
        return f"NOT DECIDED, the run ended early: {results.implementation} ({done}{tail})"
    broken = []
    for violation in results.violations:
        if violation.rule not in broken:
            broken.append(violation.rule)
    return f"VIOLATES {', '.join(broken)}: {results.implementation} ({done}{tail})"


def summary_text(results: Results, width: int = 100) -> str:
    """Matrix, smallest violations and verdict, as plain text."""
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=max(width, 80), highlight=False, no_color=True)
    console.print(matrix_table(results, console.width))
    for violation in results.violations:
        console.print(violation_text(violation), markup=False)
        console.print()
    console.print(verdict_line(results), markup=False)
    return out.getvalue().rstrip()


def rules_text(rule_id: str | None = None) -> str:
    """All rules, a line each; or one rule whole."""
    if rule_id is None:
        lines = []
        for item in RULES:
            mark = " (derived)" if item.derived else ""
            lines.append(
                textwrap.fill(
                    f"{item.statement}{mark}",
                    96,
                    initial_indent=f"{item.id:<10}",
                    subsequent_indent=" " * 10,
                )
            )
        return "\n".join(lines)
    item = rule(rule_id)
    fields = {
        "rule": item.id + (" (derived)" if item.derived else ""),
        "kind": f"{item.kind.value}, {item.kind.heading}",
        "says": item.statement,
        "broken by": f"an implementation that {item.breaks}",
        "applies to": ", ".join(operation(name).name for name in item.operations),
        "source": item.source,
    }
    return "\n".join(
        textwrap.fill(text, 96, initial_indent=f"{name + ':':<12}", subsequent_indent=" " * 12)
        for name, text in fields.items()
    )
