"""What imports what: no circle of files, and packages only in one direction."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import networkx
import pytest

from conformance.tests.imports import (
    BEGIN,
    END,
    ROOT,
    graph,
    imports,
    main,
    package_of,
    picture,
    reduced,
)

# From the bottom up; a package imports from those of lower levels, and from its own files.
LEVELS = (
    ("extra",),
    ("spec",),
    ("reference",),
    ("kernels",),
    ("adapters", "implementation"),
    ("judge",),
    ("cases",),
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
        "extra.py",
        "implementation.py",
        "plugin.py",
    }


def test_the_picture_is_the_sources() -> None:
    assert main(["--check"]) == 0, "python -m conformance.tests.imports --write"
    assert "    run --> diagnosis\n" in picture()
    assert "run --> spec" not in picture()  # which diagnosis implies


def test_the_picture_is_written_between_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nbehind\n", encoding="utf-8")
    assert main(["--check", str(page)]) == 1
    assert main(["--write", str(page)]) == 0
    assert main(["--check", str(page)]) == 0
    assert page.read_text(encoding="utf-8") == f"before\n{BEGIN}\n{picture()}\n{END}\nbehind\n"
    page.write_text(BEGIN, encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["--write", str(page)])


@pytest.mark.parametrize("seed", range(20))
def test_an_arrow_that_others_imply_is_left_out(seed: int) -> None:
    drawn = networkx.gnp_random_graph(9, 0.4, seed=seed, directed=True)
    acyclic = networkx.DiGraph([(a, b) for a, b in drawn.edges if a < b])
    found = reduced({str(a): {str(b) for b in acyclic[a]} for a in acyclic})
    wanted = networkx.transitive_reduction(acyclic)
    assert found == {str(a): {str(b) for b in wanted[a]} for a in wanted}


@pytest.mark.parametrize("seed", range(20))
def test_circles_keep_what_they_reach(seed: int) -> None:
    drawn = networkx.gnp_random_graph(9, 0.3, seed=seed, directed=True)
    found = reduced({str(a): {str(b) for b in drawn[a]} for a in drawn})
    kept = networkx.DiGraph([(int(a), int(b)) for a in found for b in found[a]])
    wanted = set(networkx.transitive_closure(drawn).edges)
    assert set(networkx.transitive_closure(kept).edges) == wanted
    for edge in kept.edges:
        fewer = kept.copy()
        fewer.remove_edge(*edge)
        assert set(networkx.transitive_closure(fewer).edges) != wanted
