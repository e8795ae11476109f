"""The page for human readers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moetail import spec
from moetail.spec.document import document, main

PAGE = Path(__file__).parents[1] / "CONTRACT.md"


def test_the_page_has_not_drifted(capsys):
    code = main(["--check", str(PAGE)])
    assert code == 0, f"run python -m moetail.spec.document --write\n{capsys.readouterr().out}"


def test_drift_is_shown(tmp_path, capsys):
    stale = tmp_path / "CONTRACT.md"
    stale.write_text(document().replace("ties to even", "ties away from zero"), encoding="utf-8")
    assert main(["--check", str(stale)]) == 1
    shown = capsys.readouterr().out
    assert re.search(r"^-.*ties away from zero", shown, re.MULTILINE)
    assert re.search(r"^\+.*ties to even", shown, re.MULTILINE)
    assert main(["--check", str(tmp_path / "absent.md")]) == 1


def test_write_then_check(tmp_path, capsys):
    path = tmp_path / "CONTRACT.md"
    assert main(["--write", str(path)]) == 0
    assert main(["--check", str(path)]) == 0
    assert capsys.readouterr().out == ""
    assert main([]) == 0
    assert capsys.readouterr().out == path.read_text(encoding="utf-8")


def test_every_link_has_its_anchor():
    page = document()
    anchors = re.findall(r'<a id="([\w-]+)"></a>', page)
    assert len(anchors) == len(set(anchors)) == len(spec.RULES)
    assert set(re.findall(r"\]\(#([\w-]+)\)", page)) <= set(anchors)


@pytest.mark.parametrize("operation", spec.OPERATIONS, ids=lambda operation: operation.name)
def test_every_operation_has_its_section(operation):
    (section,) = re.findall(
        rf"^### \d\. `{operation.name}`\n(.*?)^##", document(), re.MULTILINE | re.DOTALL
    )
    for part in ("```python", "**Returns:**", "**Refuses:**", "**Rules:**", "**Source:**"):
        assert part in section


def test_no_docstring_markup_is_left():
    page = document()
    prose = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    assert "``" not in prose
    assert ":meth:" not in prose
    assert ":class:" not in prose
    assert prose.count("`") % 2 == 0
