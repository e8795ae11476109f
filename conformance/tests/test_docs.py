"""The documentation: what its pages take from the code, and that its links lead somewhere."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from moetail.conformance.catalogue import MUTANTS
from moetail.spec.rules import RULES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("moetail_docs_hooks", DOCS / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="module")
def texts(hooks: ModuleType) -> dict[str, str]:
    return {path.name: hooks.filled(path.read_text(encoding="utf-8")) for path in PAGES}


def test_nothing_is_left_to_be_generated(texts: dict[str, str]) -> None:
    assert not [name for name, text in texts.items() if "<!-- generated" in text]
    # The pages hold heads, not copies.
    for name in ("contract.md", "rules.md", "judge.md", "command-line.md"):
        assert len((DOCS / name).read_text(encoding="utf-8")) < 1000 < len(texts[name])


def test_a_part_that_is_not_there_is_an_error(hooks: ModuleType) -> None:
    with pytest.raises(KeyError, match="no-such-part"):
        hooks.filled("<!-- generated: no-such-part -->")


def test_the_contract_is_the_specs(texts: dict[str, str]) -> None:
    committed = (ROOT / "spec" / "CONTRACT.md").read_text(encoding="utf-8")
    assert texts["contract.md"].count("\n# ") == 0
    assert committed.split("-->", 1)[1].strip() == texts["contract.md"].split("\n", 1)[1].strip()


def test_every_rule_stands_there_with_what_breaks_it(texts: dict[str, str]) -> None:
    sections = dict(
        re.findall(r"^### ([A-Z]+-\d)$(.*?)(?=^###? )", texts["rules.md"] + "\n## ", re.M | re.S)
    )
    assert list(sections) == [rule.id for rule in RULES]
    for rule in RULES:
        assert rule.statement in sections[rule.id]
        mutants = [mutant for mutant in MUTANTS if mutant.rule == rule.id]
        listed = re.findall(r"^- `([\w-]+)`: ", sections[rule.id], re.M)
        assert listed == [mutant.id for mutant in mutants]
        if mutants:
            assert re.search(r"^    (class|def) \w+\(", sections[rule.id], re.M)
            (command,) = re.findall(r"`moetail check (\S+) --rule (\S+)`", sections[rule.id])
            assert command[0] in [mutant.name for mutant in mutants]
            assert command[1] == rule.id


def test_the_judges_proofs_are_markdown(texts: dict[str, str], hooks: ModuleType) -> None:
    text = texts["judge.md"]
    for name in ("weighted_sum", "multiply", "affine", "round_bf16"):
        assert f"### `{name}`" in text
    assert "Soundness" in text
    assert ":func:" not in text
    assert "``" not in text.replace("```", "")

    class Item:
        """One.

        Such as
        - a, which
          goes on;
        - b.
        Then 1. in words:

        1. first

               code
           more
        2. second
        After.
        """

    assert hooks._docstring(Item).splitlines() == [
        "One.",
        "",
        "Such as",
        "",
        "- a, which",
        "  goes on;",
        "- b.",
        "",
        "Then 1. in words:",
        "",
        "",
        "1. first",
        "",
        "        code",
        "    more",
        "",
        "2. second",
        "",
        "After.",
    ]


def test_the_command_line_is_what_help_says(texts: dict[str, str]) -> None:
    text = texts["command-line.md"]
    for name in ("check", "init", "rules", "cases", "mutants"):
        assert f"## moetail {name}\n" in text
        assert f"Usage: moetail {name}" in text
    assert "--summary" in text
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) <= 100


def test_examples_are_shown_whole(texts: dict[str, str]) -> None:
    text = texts["writing-a-kernel.md"]
    for path in (*(DOCS / "examples").glob("*.py"), *(DOCS / "examples").glob("*.cu")):
        assert path.read_text(encoding="utf-8") in text
    assert "def todo_beam_moe_finalize(" in text


def test_plots_are_shown_where_there_are_some(
    hooks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "RESULTS", tmp_path)
    assert "![" not in hooks.plots()
    (tmp_path / "bench-x.png").write_bytes(b"")
    (tmp_path / "bench-x.json").write_text('{"machine": {"gpu": "G", "cuda": "13"}}', "utf-8")
    assert hooks.plots() == "![bench x](results/bench-x.png)\n\nG: cuda 13.\n"


def test_figures_are_those_of_the_reports(hooks: ModuleType) -> None:
    text = hooks.figures()
    for path in (ROOT / "conformance" / "results").glob("bench-*.json"):
        assert path.name in text
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        if isinstance(rows[0]["us"], dict):
            times = [time for row in rows for time in row["us"].items()]
            wanted = [f"{us:.1f}" for name, us in times if name != "default"]
        else:
            wanted = [f"{row['us']:.2f}" for row in rows if row["model"] == rows[0]["model"]]
        assert wanted
        assert all(f"| {figure} |" in text for figure in wanted)


def test_figures_without_a_report(
    hooks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "RESULTS", tmp_path)
    assert "committed yet" in hooks.figures()


def test_links_between_pages_lead_somewhere(texts: dict[str, str], hooks: ModuleType) -> None:
    generated = {"sample/report.html", *(f"results/{path.name}" for path in hooks.plot_files())}
    links = 0
    for name, text in texts.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.S)):
            if re.match(r"https?:", target) or target in generated:
                continue
            page, _, anchor = target.partition("#")
            found = texts[page or name]
            if anchor:
                slugs = {_slug(heading) for heading in re.findall(r"^#+ (.*)$", found, re.M)}
                slugs |= set(re.findall(r'<a id="([^"]+)"', found))
                assert anchor in slugs, f"{name}: {target}"
            links += 1
    assert links > 50


def _slug(heading: str) -> str:
    return re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-")


def test_every_page_is_in_the_navigation() -> None:
    named = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    assert sorted(named) == [path.name for path in PAGES]
