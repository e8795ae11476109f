"""CONTRIBUTING.md: the code that it shows is there, and its commands can be run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from moetail.conformance.catalogue.change import CATALOGUE
from moetail.conformance.cli.app import app

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", GUIDE, re.MULTILINE | re.DOTALL)
    return [re.sub(f"^{indent}", "", text, flags=re.MULTILINE) for indent, text in found]


SHOWN = [text for text in blocks("python") + blocks("cuda") if re.match(r"(#|//) \S+/", text)]
COMMANDS = [line for text in blocks("sh") for line in text.splitlines()]


@pytest.mark.parametrize("block", SHOWN, ids=range(len(SHOWN)))
def test_code_that_is_shown_is_in_its_file(block: str) -> None:
    head, _, code = block.partition("\n")
    assert code in (ROOT / head.split()[1]).read_text(encoding="utf-8")


def test_the_contracts_hold() -> None:
    code = "\n".join(text for text in blocks("python") if text not in SHOWN)
    assert code.count("assert ") == 4
    exec(code, {})


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_can_be_run(command: str) -> None:
    program, *words = shlex.split(command)
    if program == "moetail":
        commands: Any = get_command(app)
        asked = commands.commands[words[0]].make_context(words[0], words[1:]).params
        assert set(asked.get("ids") or ()) <= set(CATALOGUE)
    elif program == "nox":
        session = words[words.index("-s") + 1]
        assert f"def {session}(" in (ROOT / "noxfile.py").read_text(encoding="utf-8")
    elif words[:2] == ["-m", "pytest"]:
        paths = [ROOT / word for word in words if "/" in word and not word.startswith("build")]
        assert all(path.exists() for path in paths)
        for chosen in words[words.index("-k") + 1 :] if "-k" in words else ():
            assert chosen in CATALOGUE or chosen in paths[0].read_text(encoding="utf-8")
    else:
        assert program in (".venv/bin/pip", ".venv/bin/pre-commit")


def test_files_that_are_named_are_there() -> None:
    """A name without a folder is in that of the name before it."""
    folder = ROOT
    for name in re.findall(r"`([\w./-]+/[\w./-]+|[\w-]+\.\w+)`", GUIDE):
        path = ROOT / name if "/" in name or (ROOT / name).exists() else folder / name
        assert path.exists(), name
        folder = path.parent


def test_links_lead_somewhere() -> None:
    headings = re.findall(r"^##+ (.*)$", GUIDE, re.MULTILINE)
    anchors = {heading.lower().replace(" ", "-") for heading in headings}
    prose = re.sub("```.*?```", "", GUIDE, flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)]+)\)", prose):
        page, _, anchor = target.partition("#")
        assert (ROOT / page).exists()
        assert page or anchor in anchors, target
