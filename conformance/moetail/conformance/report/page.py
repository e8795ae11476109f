"""report.html: everything that a run found, in one file without any resource from elsewhere."""

from __future__ import annotations

import math
from importlib.resources import files
from typing import Any

from moetail.conformance.cases import SOURCES, Case
from moetail.conformance.report.picture import COLOURS, svg
from moetail.conformance.report.terminal import statement
from moetail.conformance.report.wording import (
    cell_mark,
    diagnosis,
    extent,
    headline,
    named_deviations,
    not_judged_reasons,
)
from moetail.conformance.run.check import TAIL
from moetail.conformance.run.evidence import band_name
from moetail.conformance.run.results import VIOLATES, Results, TrialResult, count, harmless
from moetail.conformance.run.trial import Trial
from moetail.spec import tokens_per_rank
from moetail.spec.rules import GATHER, OPERATIONS, RULES, Kind, operation, rule

__all__ = ["report_html"]

# Pixels of a line of pictures, of the gap and the axis of each, and of one picture at most.
_LINE, _GAP, _AXIS, _WIDE = 840, 20, 48, 560
_MOST_ABREAST = 4
_MOST_OTHERS = 12


def report_html(results: Results) -> str:
    """The page."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    text = (files(__package__) / "templates" / "report.html.j2").read_text(encoding="utf-8")
    jinja = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda item: (
            harmless(item) if isinstance(item, str) and not isinstance(item, Markup) else item
        ),
    )
    content = results.to_json()
    violations = [_violation(results, trial) for trial in results.violations]
    return jinja.from_string(text).render(
        results=results,
        headline=headline(results),
        extent=extent(results),
        counts=_counts(content["totals"]),
        facts=_facts(content),
        columns=_columns(results),
        kinds=_matrix(results),
        cell_mark=cell_mark,
        violations=violations,
        reasons=not_judged_reasons(results),
        missing=[item for item in OPERATIONS if item.name not in results.provided],
        count=count,
    )


def _counts(totals: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (f"{totals['trials']:,}", "cases"),
        (f"{totals['violations']:,}", "cases that violate"),
        (f"{totals['judged']:,}", "elements judged"),
        (f"{totals['not_judged']:,}", "elements not judged"),
        (f"{totals['ambiguous']:,}", "with two admissible values"),
        (f"{totals['seconds']:,.0f} s", "in the suite"),
    ]


def _facts(content: dict[str, Any]) -> list[tuple[str, str]]:
    """Plan and environment."""
    plan = {name: value for name, value in content["plan"].items() if value != ""}
    if isinstance(plan.get("ranks"), list):
        plan["ranks"] = ", ".join(map(str, plan["ranks"]))
    facts = {**plan, "moetail": content["moetail"], **content["environment"]}
    return [(name, str(value)) for name, value in facts.items()]


# --- the matrix -----------------------------------------------------------------------------------


def _columns(results: Results) -> list[Any]:
    used = {name for row in results.matrix().values() for name in row}
    return [item for item in OPERATIONS if item.name in used]


def _matrix(results: Results) -> list[dict[str, Any]]:
    """Rows grouped by the rules' kinds."""
    matrix = results.matrix()
    broken = {trial.rule for trial in results.violations}
    groups: dict[str, dict[str, Any]] = {}
    for rule_id, row in matrix.items():
        known = rule_id != TAIL
        name = rule(rule_id).kind.value if known else TAIL
        heading = Kind(name).heading if known else "whole tails"
        group = groups.setdefault(name, {"name": name, "heading": heading, "rows": []})
        group["rows"].append(
            {
                "id": rule_id,
                "statement": statement(rule_id),
                "cells": row,
                "broken": rule_id in broken,
            }
        )
    return list(groups.values())


# --- a violation ----------------------------------------------------------------------------------


def _violation(results: Results, trial: TrialResult) -> dict[str, Any]:
    known = next((item for item in RULES if item.id == trial.rule), None)
    failing = [
        other
        for other in results.trials
        if other.status == VIOLATES
        and (other.rule, other.operation) == (trial.rule, trial.operation)
    ]
    others = [other for other in failing if other.case != trial.case]
    # The smallest case shows what is wrong, a larger one where it lies.
    larger = max([trial, *failing], key=_pictured)
    return {
        "id": f"{trial.rule}-{operation(trial.operation).short.replace(' ', '-')}".lower(),
        "trial": trial,
        "short": operation(trial.operation).short,
        "statement": statement(trial.rule),
        "rule": known,
        "case": _case(trial),
        "diagnosis": diagnosis(trial),
        "deviations": named_deviations(trial),
        "outputs": _outputs(trial),
        "larger": larger,
        "larger_case": _case(larger),
        "larger_outputs": _outputs(larger),
        "blocks": trial.operation == GATHER,
        "failing": len(failing),
        "tried": results.matrix()[trial.rule][trial.operation].trials,
        "others": [other.case for other in others[:_MOST_OTHERS]],
        "unlisted": max(0, len(others) - _MOST_OTHERS),
    }


def _pictured(trial: TrialResult) -> int:
    """Elements of the pictures of a trial."""
    return sum(math.prod(output["shape"]) for output in trial.evidence)


def _parsed(trial: TrialResult) -> Case | None:
    try:
        return Trial.parse(trial.case, trial.operation).case
    except ValueError:  # a dump's, or another version's
        return None


def _case(trial: TrialResult) -> str:
    """The case in words."""
    case = _parsed(trial)
    if case is None:
        return ""
    sizes = [count(case.tokens, "token"), f"{count(case.top_k, 'route')} each"]
    sizes.append(f"hidden size {case.hidden:,}")
    if operation(trial.operation).distributed:
        sizes.append(count(case.ranks, "rank"))
    return f"{', '.join(sizes)}; values: {SOURCES[case.source].description}"


def _outputs(trial: TrialResult) -> list[dict[str, Any]]:
    """What is shown of each output: tables and pictures, unless it conforms on every rank."""
    names = list(dict.fromkeys(output["name"] for output in trial.evidence))
    outputs = []
    for name in names:
        ranks = [output for output in trial.evidence if output["name"] == name]
        wrong = [output for output in ranks if output.get("wrong") or "first" in output]
        outputs.append(
            {
                "name": name,
                "wrong": sum(output.get("wrong", 0) for output in ranks),
                "of": sum(math.prod(output["shape"]) for output in ranks),
                "compared": any(output.get("compared") for output in ranks),
                "several": len(ranks) > 1,
                "tables": [output for output in wrong if "first" in output],
                "structures": [output for output in ranks if "structure" in output],
                "bands": _bands(ranks),
                "cell": _cell(ranks),
                "pictures": _pictures(trial, name, ranks) if wrong else [],
            }
        )
    return outputs


def _bands(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    counts: dict[int, int] = {}
    for output in ranks:
        for code, number in output.get("distances", []):
            counts[code] = counts.get(code, 0) + number
    most = max(counts.values(), default=1)
    return [
        {**_band(code), "count": counts[code], "share": max(1, round(100 * counts[code] / most))}
        for code in sorted(counts)
    ]


def _cell(ranks: list[dict[str, Any]]) -> str:
    """What a cell of the picture is, where it is more than one element."""
    height, width = next((item["grid"]["cell"] for item in ranks if "grid" in item), (1, 1))
    if height * width == 1:
        return ""
    return (
        f"A cell is {count(height, 'token')} by {count(width, 'column')}: its colour is the worst "
        "element's, paler where fewer are wrong."
    )


def _band(code: int) -> dict[str, Any]:
    return {"name": band_name(code), "colour": COLOURS[code]}


def _pictures(trial: TrialResult, name: str, ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    case = _parsed(trial)
    abreast = min(len(ranks), _MOST_ABREAST)
    width = min(_WIDE, (_LINE - _GAP * (abreast - 1)) // abreast - _AXIS)
    pictures = []
    for output in ranks:
        if "structure" in output or len(output["shape"]) != 2 or not math.prod(output["shape"]):
            continue
        block = 0
        if case is not None and trial.operation == GATHER and case.ranks > 1:
            block = tokens_per_rank(case.tokens, case.ranks)
        caption = _caption(output, several=len(ranks) > 1)
        pictures.append(
            {
                "caption": caption,
                "width": width,
                "svg": svg(
                    output,
                    label=f"{name}, tokens by hidden. {caption}",
                    width=width,
                    block=block,
                ),
            }
        )
    return pictures


def _caption(output: dict[str, Any], *, several: bool) -> str:
    rank = f"Rank {output['rank']}: " if several else ""
    elements = math.prod(output["shape"])
    if "first" not in output:
        return f"{rank}all {elements:,} conform"
    where = f"{_range('token', *output['tokens'])}, {_range('column', *output['hidden'])}"
    verb = "differ" if output.get("compared") else "wrong"
    return f"{rank}{output['wrong']:,} of {elements:,} {verb}, in {where}"


def _range(name: str, first: int, last: int, number: int) -> str:
    if first == last:
        return f"{name} {first}"
    some = "" if number == last - first + 1 else f" ({number:,} of them)"
    return f"{name}s {first} to {last}{some}"
