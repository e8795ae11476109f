"""What imports what: no circle of files, and packages only in one direction."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# From the bottom up; a package imports from those of lower levels, and from its own files.
LEVELS = (
    ("spec",),
    ("reference",),
    ("kernels",),
    ("adapters", "implementation"),
    ("cases",),
    ("judge",),
    ("catalogue",),
    ("diagnosis",),
    ("run",),
    ("suite",),
    ("report",),
    ("score", "dumps", "export"),
    ("cli", "plugin"),
)
# An implementation is found by an adapter's name, and adapters say what is allowed in its words.
TOGETHER = {frozenset(("adapters", "implementation"))}


@cache
def modules() -> dict[str, Path]:
    """Every module of the four packages, by its dotted name."""
    found = {}
    for base in ("spec", "reference", "kernels", "conformance"):
        for path in (ROOT / base / "moetail").rglob("*.py"):
            parts = path.relative_to(ROOT / base).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports(source: str, name: str) -> Iterator[str]:
    """The modules of ours that a source imports, also inside functions and for types alone."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (item.name for item in node.names if item.name in modules())
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: a relative import"
            for item in node.names:
                inner = f"{node.module}.{item.name}"
                if inner in modules():
                    yield inner
                elif node.module in modules():
                    yield str(node.module)


@cache
def graph() -> dict[str, set[str]]:
    return {
        name: set(imports(path.read_text(encoding="utf-8"), name)) - {name}
        for name, path in modules().items()
    }


def package_of(name: str) -> str:
    """ "run" of moetail.conformance.run.call, "spec" of moetail.spec.rules."""
    parts = name.split(".")
    return parts[2] if parts[1] == "conformance" and len(parts) > 2 else parts[1]


def level_of(package: str) -> int:
    (level,) = (number for number, names in enumerate(LEVELS) if package in names)
    return level


def test_the_graph_is_read_as_python_reads_it() -> None:
    source = (
        "def f():\n    import moetail.spec\n    from moetail.conformance.run import call, plan\n"
    )
    source += "from moetail.spec import Case, rules\nimport torch\n"
    assert set(imports(source, "x")) == {
        "moetail.spec",
        "moetail.spec.rules",
        "moetail.conformance.run.call",
        "moetail.conformance.run.plan",
    }
    assert "moetail.conformance.run.check" in graph()["moetail.conformance.run.runner"]


def test_no_files_import_each_other_in_a_circle() -> None:
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def test_packages_import_in_one_direction() -> None:
    wrong = []
    for name, targets in graph().items():
        here = package_of(name)
        if here == "conformance":
            continue
        for target in targets:
            there = package_of(target)
            if there == here or frozenset((here, there)) in TOGETHER:
                continue
            if level_of(there) >= level_of(here):
                wrong.append(f"{name} imports {target}")
    assert not wrong, "\n".join(wrong)


def test_few_modules_lie_loose() -> None:
    root = ROOT / "conformance" / "moetail" / "conformance"
    assert {path.name for path in root.glob("*.py")} == {
        "__init__.py",
        "implementation.py",
        "plugin.py",
    }
