"""What a run leaves behind for people and for other programs.

terminal   what is printed
page       report.html, complete in itself
picture    where the wrong elements lie, as an image
junit      junit.xml, for CI systems
summary    the same in short, as Markdown for a CI job's page
badge      one line for a README, as JSON
"""

from __future__ import annotations

from pathlib import Path

from moetail.conformance.implementation import UsageError
from moetail.conformance.run.results import Results

__all__ = ["append_summary", "check_summary", "write_report"]


def write_report(results: Results, folder: Path) -> None:
    """Writes report.json, report.html, junit.xml and badge.json into a folder that is there.

    Of dumps no badge: calls that went well say too little.
    """
    from moetail.conformance.report.badge import badge_json
    from moetail.conformance.report.junit import junit_xml
    from moetail.conformance.report.page import report_html

    results.write_json(folder / "report.json")
    (folder / "report.html").write_text(report_html(results), encoding="utf-8")
    (folder / "junit.xml").write_text(junit_xml(results), encoding="utf-8")
    if results.plan.get("profile") != "dump":
        (folder / "badge.json").write_text(badge_json(results), encoding="utf-8")


def check_summary(path: Path) -> None:
    """Refuses, before a long run, a summary that could not be written after it."""
    try:
        path.expanduser().open("a", encoding="utf-8").close()
    except OSError as error:
        raise UsageError(f"--summary: {path}: {error.strerror}; allowed: a file") from None


def append_summary(results: Results, path: Path) -> None:
    """Adds the summary to a file, which may hold those of other steps."""
    from moetail.conformance.report.summary import summary_markdown

    with path.expanduser().open("a", encoding="utf-8") as file:
        file.write(summary_markdown(results))
