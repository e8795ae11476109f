"""Results as text for a terminal, folded between words."""

from __future__ import annotations

import io
import shlex
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from moetail.conformance.report.wording import (
    diagnosis,
    named_deviations,
    not_judged_reasons,
    raised_before,
)
from moetail.conformance.run.check import TAIL
from moetail.conformance.run.results import (
    CONFORMS,
    NOT_DECIDED,
    NOT_JUDGED,
    VIOLATES,
    Results,
    TrialResult,
    count,
    harmless,
)
from moetail.spec.rules import OPERATIONS, RULES, operation, rule

__all__ = [
    "folded",
    "matrix_tables",
    "not_judged_lines",
    "rules_text",
    "statement",
    "summary_text",
    "verdict_line",
    "violation_text",
    "violation_texts",
]

WIDTH = 96
_MARKS = {CONFORMS: "ok", VIOLATES: "VIOLATES", NOT_JUDGED: "not judged"}
_STYLES = {CONFORMS: "green", VIOLATES: "bold red", NOT_JUDGED: "yellow"}
_MOST_REASONS = 5

TAIL_STATEMENT = "Whole tails on real layers and on arbitrary cases: every element is admissible."


def statement(rule_id: str) -> str:
    """What a rule says."""
    return TAIL_STATEMENT if rule_id == TAIL else rule(rule_id).statement


def folded(text: str, width: int = WIDTH, label: str = "", indent: int = 0) -> str:
    """Text in lines of whole words; longer words stand alone. The label stands in front."""
    return textwrap.fill(
        harmless(text),
        max(width, indent + 20),
        initial_indent=label.ljust(indent),
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


# --- the matrix -----------------------------------------------------------------------------------


def matrix_tables(results: Results, width: int) -> Iterator[Any]:
    """Rules by the operations that are provided: what to print for so many columns of text.

    Columns that do not fit beside the others follow in a table of their own.
    """
    from rich.table import Table
    from rich.text import Text

    matrix = results.matrix()
    columns = [
        item
        for item in OPERATIONS
        if item.name in results.provided and any(item.name in row for row in matrix.values())
    ]
    if not columns:
        return
    yield Text(folded(f"{results.implementation}: rules by operations", width))
    marks = {
        item.name: [_MARKS[row[item.name].status] for row in matrix.values() if item.name in row]
        for item in columns
    }
    narrow, wide = (
        {
            item.name: max(
                len(part) for text in (item.short, *marks[item.name]) for part in of(text)
            )
            for item in columns
        }
        for of in (str.split, lambda text: [text])
    )
    for group in _groups([item.name for item in columns], narrow, width):
        fits = _table_width(wide[name] for name in group) <= width
        table = Table()
        table.add_column("rule", width=_RULE_WIDTH)
        for name in group:
            item = operation(name)
            table.add_column(item.short, justify="center", width=(wide if fits else narrow)[name])
        for rule_id, row in matrix.items():
            if not any(name in row for name in group):
                continue
            cells = [row[name].status if name in row else "" for name in group]
            table.add_row(
                rule_id, *(Text(_MARKS[cell], _STYLES[cell]) if cell else Text() for cell in cells)
            )
        yield table
    shown = {cell.status for row in matrix.values() for cell in row.values()}
    legend = "ok: conforms." + ("  not judged: see below." if NOT_JUDGED in shown else "")
    yield Text(folded(f"{legend}  empty: the rule does not apply.", width))


_RULE_WIDTH = max(len(item.id) for item in RULES)


def _table_width(columns: Iterable[int]) -> int:
    """With a line and a blank on both sides of each column."""
    return _RULE_WIDTH + 4 + sum(size + 3 for size in columns)


def _groups(names: list[str], sizes: dict[str, int], width: int) -> Iterator[list[str]]:
    """The names, in order, as many at a time as fit beside each other."""
    group: list[str] = []
    for name in names:
        if group and _table_width(sizes[each] for each in (*group, name)) > width:
            yield group
            group = []
        group.append(name)
    yield group


# --- violations -----------------------------------------------------------------------------------


def violation_texts(results: Results, width: int) -> Iterator[str]:
    """The smallest violations; what several raised alike is traced once."""
    for violation, before in raised_before(results.violations):
        above = "" if before is None else f"{before.rule} by {operation(before.operation).short}"
        yield violation_text(violation, width, traced_by=above)


def violation_text(result: TrialResult, width: int = WIDTH, *, traced_by: str = "") -> str:
    """One violation, with all that its author needs to see it again.

    Args:
        traced_by: the violation that has shown the traceback already.
    """

    def field(name: str, text: str) -> str:
        return folded(text, width, f"  {name}:", 13)

    lines = [
        f"{result.rule} violated by {result.operation}",
        field("rule", statement(result.rule)),
        field("case", result.case),
        field("found", result.found),
    ]
    if explanation := diagnosis(result):
        lines.append(field("diagnosis", explanation))
    for deviation in named_deviations(result):
        lines.append(folded(f"{deviation.id}: {deviation.sentence}", width, indent=13))
    lines.append(_command("  repeat:    ", harmless(result.repeat), width))
    if traced_by:
        lines.append(field("raised", f"where {traced_by}, above, did"))
    elif result.trace:
        lines.append(textwrap.indent(harmless(result.trace.rstrip()), "  | "))
    return "\n".join(lines)


def _command(label: str, command: str, width: int) -> str:
    """A command to copy: in one line, or in several that a shell takes for one."""
    if len(label) + len(command) <= width:
        return label + command
    lines, line = [label.rstrip()], "   "
    for word in map(shlex.quote, shlex.split(command)):
        if len(line) + len(word) + 3 > width:
            lines.append(f"{line} \\")
            line = "     "
        line += f" {word}"
    return "\n".join([*lines, line])


def not_judged_lines(results: Results, width: int) -> Iterator[str]:
    """Why some was not judged, the most frequent reasons first."""
    reasons = sorted(not_judged_reasons(results), key=lambda item: -item[2])
    for reason, places, number in reasons[:_MOST_REASONS]:
        cases = f" ({count(number, 'case')})" if number else ""
        yield folded(f"{'; '.join(places)}{cases}: {reason}", width, "Not judged:", 12)
    if len(reasons) > _MOST_REASONS:
        yield f"Not judged: {count(len(reasons) - _MOST_REASONS, 'more reason')}"


# --- the verdict ----------------------------------------------------------------------------------


def verdict_line(results: Results) -> str:
    """The verdict and how much it rests on."""
    cases = count(len(results.trials), "case")
    if len(results.trials) < results.planned:
        cases = f"{len(results.trials):,} of {count(results.planned, 'case')}"
    done = (
        f"{cases}, {results.judged:,} elements judged, {results.not_judged:,} elements not judged"
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
    for part in matrix_tables(results, console.width):
        console.print(part)
    for text in violation_texts(results, console.width):
        out.write(f"{text}\n\n")
    for line in not_judged_lines(results, console.width):
        out.write(f"{line}\n")
    out.write(folded(verdict_line(results), console.width))
    return out.getvalue().rstrip()


# --- the rules ------------------------------------------------------------------------------------


def rules_text(rule_ids: Sequence[str] = ()) -> str:
    """All rules in short; or those given, whole."""
    width = min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
    if not rule_ids:
        return "\n".join(
            folded(f"{item.statement}{' (derived)' * item.derived}", width, item.id, 10)
            for item in RULES
        )
    return "\n\n".join(
        "\n".join(folded(text, width, f"{name}:", 12) for name, text in _fields(rule_id).items())
        for rule_id in rule_ids
    )


def _fields(rule_id: str) -> dict[str, str]:
    if rule_id == TAIL:
        return {"rule": TAIL, "says": TAIL_STATEMENT, "broken by": "what the diagnosis names"}
    item = rule(rule_id)
    return {
        "rule": item.id + " (derived)" * item.derived,
        "kind": f"{item.kind.value}, {item.kind.heading}",
        "says": item.statement,
        "broken by": f"an implementation that {item.breaks}",
        "applies to": ", ".join(operation(name).name for name in item.operations),
        "source": item.source,
    }
