"""A run in short, as Markdown for the page of a CI job."""

from __future__ import annotations

import re

from moetail.conformance.report.terminal import statement
from moetail.conformance.report.wording import (
    cell_mark,
    diagnosis,
    extent,
    headline,
    named_deviations,
    not_judged_reasons,
)
from moetail.conformance.run.results import (
    NOT_PROVIDED,
    VIOLATES,
    Results,
    TrialResult,
    count,
    harmless,
)
from moetail.spec.rules import OPERATIONS

__all__ = ["summary_markdown"]

_MOST_ELEMENTS = 5
_SIGNS = {VIOLATES: "❌", "conforms": "✅"}


def summary_markdown(results: Results) -> str:
    """GitHub-flavoured Markdown: verdict, matrix, and each violation folded."""
    sign = _SIGNS.get(results.verdict, "⚪")
    part = extent(results)
    lines = [
        f"### {sign} {headline(results)}: {_code(results.implementation)}",
        "",
        f"{count(len(results.trials), 'case')}, {results.judged:,} elements judged"
        + (f", on {part}" if part else "")
        + ".",
        "",
    ]
    if results.stopped:
        lines += [f"**The run ended early:** {_text(results.stopped)}.", ""]
    lines += _matrix(results)
    for violation in results.violations:
        lines += _violation(violation)
    reasons = not_judged_reasons(results)
    if reasons:
        lines += ["<details><summary>Not judged</summary>", ""]
        lines += [
            f"- {_text(reason)} ({count(number, 'case')}: {', '.join(places)})"
            for reason, places, number in reasons
        ]
        lines += ["", "</details>", ""]
    return "\n".join(lines)


def _matrix(results: Results) -> list[str]:
    """The rules that were tried, by the operations that are provided."""
    matrix = {
        rule_id: {name: cell for name, cell in row.items() if cell.status != NOT_PROVIDED}
        for rule_id, row in results.matrix().items()
    }
    matrix = {rule_id: row for rule_id, row in matrix.items() if row}
    columns = [item for item in OPERATIONS if any(item.name in row for row in matrix.values())]
    if not columns:
        return []
    lines = [
        f"| rule | {' | '.join(item.short for item in columns)} |",
        f"|---|{'---|' * len(columns)}",
    ]
    for rule_id, row in matrix.items():
        cells = []
        for item in columns:
            cell = row.get(item.name)
            mark = "" if cell is None else cell_mark(cell)
            cells.append(f"**{mark}**" if cell is not None and cell.status == VIOLATES else mark)
        lines.append(f"| {rule_id} | {' | '.join(cells)} |")
    return [*lines, ""]


def _violation(violation: TrialResult) -> list[str]:
    lines = [
        f"<details><summary><b>{violation.rule}</b> violated by "
        f"<code>{violation.operation}</code></summary>",
        "",
        f"> {_text(statement(violation.rule))}",
        "",
        f"- found: {_text(violation.found)}",
    ]
    if explanation := diagnosis(violation):
        lines.append(f"- diagnosis: {_text(explanation)}")
        lines += [
            f"    - {_code(item.id)}: {_text(item.sentence)}"
            for item in named_deviations(violation)
        ]
    lines.append(f"- case: {_code(violation.case)}")
    return [*lines, "", *_elements(violation), *_block(violation.repeat), "</details>", ""]


def _elements(violation: TrialResult) -> list[str]:
    shown = next((output for output in violation.evidence if output.get("first")), None)
    if shown is None:
        return []
    lines = ["| element | found | expected | ulps |", "|---|---|---|---|"]
    for element in shown["first"][:_MOST_ELEMENTS]:
        got, lo, hi = (" ".join(element[name]).strip() for name in ("got", "lo", "hi"))
        due = lo if lo == hi else f"{lo} .. {hi}"
        ulps = "NaN" if element["ulps"] is None else f"{element['ulps']:,}"
        lines.append(f"| {shown['name']}{element['index']} | {got} | {due} | {ulps} |")
    return [*lines, ""]


def _text(text: str) -> str:
    """Text that no character of is markup."""
    escaped = re.sub(r"([\\`*_{}\[\]<>#|~&])", r"\\\1", harmless(text))
    return " ".join(escaped.split())


def _fence(text: str, least: int) -> str:
    """Backticks enough for a text that has some."""
    return "`" * max([least, *(len(run) + 1 for run in re.findall("`+", text))])


def _code(text: str) -> str:
    text = harmless(text)
    fence = _fence(text, 1)
    space = " " if "`" in text else ""
    return f"{fence}{space}{' '.join(text.split())}{space}{fence}"


def _block(text: str) -> list[str]:
    text = harmless(text)
    fence = _fence(text, 3)
    return [f"{fence}sh", text, fence, ""]
