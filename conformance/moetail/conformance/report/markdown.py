"""A generated part of a Markdown file, between two markers."""

from __future__ import annotations

from pathlib import Path

from moetail.conformance.implementation import UsageError

__all__ = ["BEGIN", "END", "find", "replace"]

BEGIN = "<!-- begin: moetail mutants --compare -->"
END = "<!-- end: moetail mutants --compare -->"


def find(path: Path) -> tuple[str, str]:
    """The text before and behind the part.

    Raises:
        UsageError: no such file, or not exactly one pair of markers in it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--into: {path}: {error.strerror}; allowed: a Markdown file") from None
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise UsageError(f"--into: {path} needs one line {BEGIN} and, behind it, one {END}")
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN, END + rest.partition(END)[2]


def replace(path: Path, part: str) -> None:
    """Put ``part`` between the markers."""
    before, behind = find(path)
    path.write_text(f"{before}\n{part.strip()}\n{behind}", encoding="utf-8")
