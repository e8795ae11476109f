"""A badge, as the JSON that shields-style endpoints read."""

from __future__ import annotations

import json

from moetail.conformance.report.wording import broken_rules, extent
from moetail.conformance.run.results import CONFORMS, NOT_DECIDED, VIOLATES, Results

__all__ = ["badge_json"]

_COLOURS = {CONFORMS: "brightgreen", VIOLATES: "red"}
_MOST_RULES = 3


def badge_json(results: Results) -> str:
    """Says what was judged where it was not everything, so that no badge claims too much."""
    content = {
        "schemaVersion": 1,
        "label": "MoE tail contract",
        "message": _message(results),
        "color": _COLOURS.get(results.verdict, "lightgrey"),
    }
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _message(results: Results) -> str:
    if results.verdict == VIOLATES:
        broken = broken_rules(results)
        more = f" and {len(broken) - _MOST_RULES} more" if len(broken) > _MOST_RULES else ""
        return f"violates {', '.join(broken[:_MOST_RULES])}{more}"
    if results.verdict == CONFORMS:
        part = extent(results)
        return f"conforms ({part})" if part else "conforms"
    return "not completed" if results.verdict == NOT_DECIDED else "nothing judged"
