"""What a run leaves behind for people and for other programs.

terminal   what is printed
page       report.html, complete in itself
picture    where the wrong elements lie, as an image
junit      junit.xml, for CI systems
summary    the same in short, as Markdown for a CI job's page
badge      one line for a README, as JSON
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import moetail.conformance.extra  # noqa: F401
from moetail.conformance.implementation import UsageError
from moetail.conformance.run.results import Results

__all__ = ["append_summary", "check_summary", "write", "write_report"]


def write_report(results: Results, folder: Path) -> list[str]:
    """Writes report.json, report.html, junit.xml and badge.json; a line for each that it could not.

    Of dumps no badge: calls that went well say too little.
    """
    from moetail.conformance.report.badge import badge_json
    from moetail.conformance.report.junit import junit_xml
    from moetail.conformance.report.page import report_html

    files: dict[str, Callable[[Results], str]] = {
        "report.json": Results.json_text,
        "report.html": report_html,
        "junit.xml": junit_xml,
    }
    if results.plan.get("profile") != "dump":
        files["badge.json"] = badge_json
    complaints = [write(folder / name, text(results)) for name, text in files.items()]
    return [complaint for complaint in complaints if complaint]


def write(path: Path, text: str, mode: str = "w") -> str:
    """Writes a file; what kept it from being written, in a line, or ""."""
    try:
        with path.expanduser().open(mode, encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError as error:
        if mode == "w":
            with contextlib.suppress(OSError):
                path.unlink()  # half a report says nothing
        return f"not written: {path}: {error.strerror}"
    return ""


def check_summary(path: Path) -> None:
    """Refuses, before a long run, what is no file and could not be one."""
    try:
        path.expanduser().open("a", encoding="utf-8").close()
    except (IsADirectoryError, NotADirectoryError, FileNotFoundError) as error:
        raise UsageError(f"--summary: {path}: {error.strerror}; allowed: a file") from None
    except OSError:
        pass  # said where it is written: the verdict does not hang on it


def append_summary(results: Results, path: Path) -> str:
    """Adds the summary to a file, which may hold those of other steps; returns as write."""
    from moetail.conformance.report.summary import summary_markdown

    return write(path, summary_markdown(results), "a")
