"""The files for GitHub and for pre-commit: they run the sessions that there are."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*-*.yml"))


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def noxfile() -> tuple[set[str], set[str], set[str]]:
    """The sessions for any machine, those for a GPU, and the architectures of GPUs."""
    plain, on_gpu, architectures = set(), set(), set()
    for node in ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            marks = [ast.unparse(mark) for mark in node.decorator_list]
            if "nox.session" in marks:
                (on_gpu if len(marks) > 1 else plain).add(node.name)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ARCHITECTURES":
            architectures = set(ast.literal_eval(node.value))
    return plain, on_gpu, architectures


def job(name: str) -> Any:
    return read(ROOT / ".github" / "workflows" / name)["jobs"]["session"]


def commands(name: str) -> list[str]:
    return [step["run"] for step in job(name)["steps"] if "run" in step]


def test_sessions_without_a_gpu_run_on_every_push() -> None:
    plain, _, _ = noxfile()
    matrix = job("cpu.yml")["strategy"]["matrix"]
    assert set(matrix["session"]) == plain
    assert {item["session"] for item in matrix["include"]} <= plain
    assert commands("cpu.yml")[-1] == "python -m nox -s ${{ matrix.session }}"
    # YAML 1.1, which the parser reads, takes "on" for true.
    assert set(read(ROOT / ".github/workflows/cpu.yml")[True]) == {"push", "pull_request"}


def test_pythons_are_those_that_the_package_names() -> None:
    matrix = job("cpu.yml")["strategy"]["matrix"]
    tried = {*matrix["python"], *(item["python"] for item in matrix["include"])}
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    named = re.findall(r"Python :: (3\.\d+)", text)
    assert {named[0], named[-1]} < tried <= set(named)
    assert f'requires-python = ">={named[0]}"' in text


def test_sessions_of_a_gpu_are_for_its_architecture() -> None:
    _, on_gpu, architectures = noxfile()
    run = re.findall(
        r'nox -s "(\w+)\(\$\{\{ matrix\.arch \}\}\)" -- --require-gpu',
        "\n".join(commands("gpu.yml")),
    )
    assert set(run) == on_gpu
    when = read(ROOT / ".github/workflows/gpu.yml")[True]
    assert set(when["workflow_dispatch"]["inputs"]["arch"]["options"]) == architectures
    # What comes from outside never reaches a runner of one's own.
    assert set(when) == {"schedule", "workflow_dispatch"}
    assert job("gpu.yml")["runs-on"][0] == "self-hosted"


@pytest.mark.parametrize("path", [*WORKFLOWS, ROOT / "docs" / "ci.md"], ids=lambda path: path.name)
def test_actions_are_of_one_major_version(path: Path) -> None:
    used = re.findall(r"uses: (\S+)", path.read_text(encoding="utf-8"))
    assert used
    assert set(used) <= {
        "actions/checkout@v7",
        "actions/setup-python@v7",
        "actions/upload-artifact@v7",
    }


def test_a_commit_is_checked_by_lint_and_types() -> None:
    (local,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert local["repo"] == "local"
    entries = {hook["id"]: hook["entry"] for hook in local["hooks"]}
    assert entries == {
        name: f".venv/bin/python -m nox --no-venv -s {name}" for name in ("lint", "types")
    }
    assert set(entries) <= noxfile()[0]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_asks_for_what_repeats_it(path: Path) -> None:
    asked = {part["id"]: part for part in read(path)["body"]}
    for name in ("repeat", "report", "versions"):
        assert asked[name]["validations"]["required"] is True


def test_there_are_two_forms() -> None:
    assert [path.stem for path in FORMS] == ["false-alarm", "missed-fault"]
