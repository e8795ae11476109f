"""The report: what violations keep, and the page, the summary and the badge made of it."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moetail.conformance.implementation import UsageError
from moetail.conformance.judge import OutputVerdict, Verdict
from moetail.conformance.report import append_summary, check_summary, write_report
from moetail.conformance.report.badge import badge_json
from moetail.conformance.report.page import report_html
from moetail.conformance.report.picture import png, svg
from moetail.conformance.report.summary import summary_markdown
from moetail.conformance.report.wording import diagnosis
from moetail.conformance.run.evidence import (
    CLASS,
    FIRST_BAND,
    LEVEL,
    LEVELS,
    MOST_CELLS,
    MOST_ELEMENTS,
    NOT_JUDGED,
    RIGHT,
    band_name,
    cells_of,
    codes_of,
    comparison_evidence,
    verdict_evidence,
)
from moetail.conformance.run.plan import Plan
from moetail.conformance.run.results import CONFORMS, VIOLATES, Results, TrialResult
from moetail.conformance.run.results import NOT_JUDGED as UNDECIDED
from moetail.conformance.suite import run_suite
from moetail.spec import rule
from moetail.spec.rules import FINALIZE, GATHER

# Rounds once instead of twice.
BROKEN = """
import torch


def beam_moe_finalize(
    expert_outputs, expert_weights, output, routed_scale=1.0, post_weight=None, post_eps=None
):
    live = output.shape[0]
    weighted = expert_weights[:live, :, None] * expert_outputs[:live].float()
    return output.copy_(weighted.sum(1) * torch.tensor(routed_scale))
"""

ODD = "a <b>&amp; `x` | \"y\" 'z'.py"


def bf16(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.bfloat16)


def from_bits(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def output(got: Tensor, lo: Tensor, hi: Tensor, *, rank: int = 0) -> OutputVerdict:
    free = lo.isinf() & hi.isinf() & (lo != hi)
    same = (got.isnan() & lo.isnan()) | ((lo <= got) & (got <= hi)) | free
    wrong = ~same
    return OutputVerdict(
        rank=rank,
        name="hidden",
        judged=int((~free).sum()),
        not_judged=int(free.sum()),
        ambiguous=0,
        wrong=int(wrong.sum()),
        wrong_mask=wrong,
        got=got,
        lo=lo,
        hi=hi,
    )


def evidence(*outputs: OutputVerdict) -> list[dict[str, Any]]:
    return verdict_evidence(Verdict(GATHER, outputs))


# --- evidence -------------------------------------------------------------------------------------


def test_distances_are_steps_to_the_nearest_admissible_value() -> None:
    lo = from_bits([0x3F80, 0x3F80, 0x3F80, 0x0001, 0x8001, 0x7F7F])
    hi = from_bits([0x3F82, 0x3F82, 0x3F80, 0x0001, 0x8001, 0x7F7F])
    got = from_bits([0x3F7F, 0x3F85, 0x3F80, 0x8001, 0x0000, 0x7F80])
    (found,) = evidence(output(got, lo, hi))
    steps = {element["index"][1]: element["ulps"] for element in found["first"]}
    # Below, above, right (not listed), across zero, from zero, and infinity beside the largest.
    assert steps == {0: 1, 1: 3, 3: 2, 4: 1, 5: 1}
    assert found["wrong"] == 5
    assert found["distances"] == [[FIRST_BAND, 3], [FIRST_BAND + 1, 2]]
    shown = found["first"][0]
    assert (shown["got"][1], shown["lo"][1], shown["hi"][1]) == ("0x3f7f", "0x3f80", "0x3f82")
    assert float(shown["lo"][0]) == 1.0
    assert codes_of(found["grid"])[0] == [2, 3, RIGHT, 3, 2, 2]


def test_nan_and_what_is_not_judged_are_told_apart() -> None:
    nan, inf = float("nan"), float("inf")
    lo, hi = bf16([nan, 1.0, nan, -inf]), bf16([nan, 1.0, nan, inf])
    (found,) = evidence(output(bf16([2.0, nan, nan, nan]), lo, hi))
    assert codes_of(found["grid"])[0] == [CLASS, CLASS, RIGHT, NOT_JUDGED]
    assert [element["ulps"] for element in found["first"]] == [None, None]
    assert found["first"][1]["got"][0] == "NaN"
    assert found["distances"] == [[CLASS, 2]]


def test_a_large_output_is_bounded_and_loses_no_place() -> None:
    got = torch.zeros(300, 1000, dtype=torch.bfloat16)
    lo = got.clone()
    got[299, 999] = 1.0  # far off
    got[299, 998] = 1e-40  # near, in the same cell
    got[0, :40] = 2.0
    (found,) = evidence(output(got, lo, lo))
    codes = codes_of(found["grid"])
    assert len(codes) <= MOST_CELLS
    assert len(codes[0]) <= MOST_CELLS
    assert codes[-1][-1] == CLASS - 1
    height, width = found["grid"]["cell"]
    assert height * width == 3 * 8
    cells = cells_of(found["grid"])
    # Two of 24 are wrong, a quarter at most; of the first cells 8 of 24, more than a quarter.
    assert cells[-1][-1] == CLASS - 1
    assert cells[0][0] == CLASS - 1 + LEVEL
    assert {code for row in codes[1:-1] for code in row} == {RIGHT}
    assert len(found["first"]) == MOST_ELEMENTS
    assert found["wrong"] == 42
    assert found["tokens"] == [0, 299, 2]
    assert found["hidden"] == [0, 999, 42]
    assert len(json.dumps(found)) < 8000


def test_comparisons_keep_what_differs_in_any_dtype() -> None:
    first, second = torch.tensor([1, 2, 3]), torch.tensor([1, -1, 3])
    (found,) = comparison_evidence("map", first, second)
    assert found["first"] == [
        {"index": [1, 0], "ulps": 3, "got": ["-1", ""], "lo": ["2", ""], "hi": ["2", ""]}
    ]
    wide = torch.tensor([[1.0, 2.0]])
    (found,) = comparison_evidence("weights", wide, torch.nextafter(wide, wide + 9))
    assert [element["ulps"] for element in found["first"]] == [1, 1]
    assert found["first"][0]["got"][1] == "0x3f800001"
    assert comparison_evidence("x", wide[:0], wide[:0])[0].get("first") is None


def test_a_structural_fault_is_kept_as_a_sentence() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    fault = OutputVerdict(1, "hidden", 6, 0, 0, 6, mask, structure="hidden is None, not a tensor")
    (found,) = evidence(fault)
    assert found["structure"] == "hidden is None, not a tensor"
    assert "first" not in found


def test_bands_are_named_without_gaps() -> None:
    names = [band_name(code) for code in range(CLASS + 1)]
    assert names[FIRST_BAND : FIRST_BAND + 3] == ["1 ulp", "2 to 3 ulps", "4 to 7 ulps"]
    assert names[CLASS - 1] == "4,096 ulps or more"
    assert len(set(names)) == len(names)


# --- pictures -------------------------------------------------------------------------------------


def test_the_png_holds_the_codes() -> None:
    strong = LEVEL * (LEVELS - 1)
    data = png([[0, 1, 2], [3 + strong, CLASS, 0]])
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        (checksum,) = struct.unpack(">I", data[at + 8 + size : at + 12 + size])
        assert checksum == zlib.crc32(kind + body)
        chunks[kind] = body
        at += 12 + size
    assert struct.unpack(">IIBBBBB", chunks[b"IHDR"]) == (3, 2, 8, 3, 0, 0, 0)
    assert zlib.decompress(chunks[b"IDAT"]) == bytes([0, 0, 1, 2, 0, 3 + strong, CLASS, 0])
    opacity, palette = chunks[b"tRNS"], chunks[b"PLTE"]
    assert opacity[0] == 0
    assert 0 < opacity[3] < opacity[3 + strong] == 255
    assert palette[9:12] == palette[3 * (3 + strong) :][:3]


def test_a_picture_parts_the_ranks_blocks() -> None:
    lo = torch.zeros(5, 4, dtype=torch.bfloat16)
    (found,) = evidence(output(lo + 1, lo, lo))
    assert svg(found, label="x", width=100, block=2).count('class="block"') == 2
    assert 'class="block"' not in svg(found, label="x", width=100)
    assert "&lt;&amp;" in svg(found, label="<&", width=100)


# --- a run ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """A file of an odd name that breaks ROUND-2, judged on one operation."""
    path = tmp_path_factory.mktemp("odd") / ODD
    path.write_text(BROKEN, encoding="utf-8")
    return run_suite(str(path), Plan(), rules=("ROUND-2", "ROUND-3", "LIVE-2"))


@pytest.fixture(scope="module")
def distributed(results: Results) -> Results:
    """The same with a violation on two ranks of three, and a rule that could not be judged."""
    lo = torch.zeros(7, 256, dtype=torch.bfloat16)
    bad = lo.clone()
    bad[6] = 1.0
    verdicts = [output(value, lo, lo, rank=rank) for rank, value in enumerate((bad, lo, bad))]
    case = f"{GATHER}/normal/T7-K2-H256/seed:1+ranks:3"
    trial = TrialResult(
        "OWN-1",
        GATHER,
        case,
        "test_own_1_consecutive_blocks",
        VIOLATES,
        judged=7 * 256 * 3,
        elements=7 * 2 * 256 * 3,
        found="rank 0: hidden[6, 0] = 0x3f80 (1.0); admissible: 0x0000 (0.0)",
        deviations=("ownership-floor",),
        wrong=512,
        explained=1.0,
        repeat=f"moetail check x.py --rule OWN-1 --case {case}",
        trace="Traceback <b>",
        evidence=evidence(*verdicts),
    )
    skipped = TrialResult(
        "RUN-4", FINALIZE, "x", "test_run_4", UNDECIDED, found="there is no GPU <here>"
    )
    return replace(
        results,
        provided=(FINALIZE, GATHER),
        rules=(),
        trials=[*results.trials, trial, skipped],
    )


def test_a_run_keeps_evidence_of_the_smallest_violation(results: Results) -> None:
    (violation,) = results.violations
    (found,) = violation.evidence
    assert found["name"] == "output"
    assert found["wrong"] > 0
    assert found["first"][0]["ulps"] >= 1
    failing = [trial for trial in results.trials if trial.status == VIOLATES]
    assert len([trial for trial in failing if trial.evidence]) < len(failing)
    assert not [trial for trial in results.trials if trial.evidence and trial.status == CONFORMS]


def test_evidence_travels_between_processes(distributed: Results) -> None:
    execnet = pytest.importorskip("execnet")
    for trial in distributed.trials:
        fields = asdict(trial)
        assert TrialResult(**execnet.loads(execnet.dumps(fields))) == trial
        written = json.dumps(fields, allow_nan=False)
        assert json.dumps(asdict(TrialResult(**json.loads(written)))) == written


# --- the page -------------------------------------------------------------------------------------


class Element:
    """An element of a page: enough of a tree to look things up in."""

    def __init__(self, tag: str, attributes: dict[str, str]) -> None:
        self.tag, self.attributes = tag, attributes
        self.children: list[Element | str] = []

    @property
    def text(self) -> str:
        parts = (item if isinstance(item, str) else item.text for item in self.children)
        return " ".join(" ".join(parts).split())

    def all(self, tag: str = "", **attributes: str) -> Iterator[Element]:
        for child in self.children:
            if isinstance(child, Element):
                wanted = {name.rstrip("_"): value for name, value in attributes.items()}
                if tag in ("", child.tag) and all(
                    value in child.attributes.get(name, "").split()
                    for name, value in wanted.items()
                ):
                    yield child
                yield from child.all(tag, **attributes)


class Page(HTMLParser):
    VOID = ("meta", "br", "rect", "image", "line")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.root = Element("", {})
        self.open = [self.root]
        self.feed(text)
        self.close()
        assert self.open == [self.root], "a tag is not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        made = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(made)
        if tag not in self.VOID:
            self.open.append(made)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Element(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


@pytest.fixture(scope="module")
def page(distributed: Results) -> Element:
    return Page(report_html(distributed)).root


def test_the_page_is_complete_in_itself(page: Element) -> None:
    tags = {element.tag for element in page.all()}
    assert not tags & {"script", "link", "iframe", "object", "img"}
    for element in page.all():
        for name in ("href", "src", "xlink:href"):
            value = element.attributes.get(name, "")
            assert value == "" or value.startswith(("#", "data:image/png;base64,"))
    (style,) = page.all("style")
    assert "url(" not in style.text
    assert "@import" not in style.text
    assert "prefers-color-scheme: dark" in style.text
    assert "@media print" in style.text


@pytest.mark.parametrize(
    ("deviations", "wrong", "explained", "said"),
    [
        ((), 0, 0.0, ""),
        ((), 7, 0.0, "no known deviation explains it"),
        (("ownership-floor",), 1, 1.0, "ownership-floor (OWN-1) explains all of 1 wrong element"),
        (("truncates",), 4096, 0.75, "truncates (ROUND-3) explains 75% of 4,096 wrong elements"),
        (
            ("truncates", "eps-missing"),
            2,
            0.5,
            "truncates (ROUND-3) and eps-missing (ROUND-4) together explain 50% of 2 wrong "
            "elements",
        ),
    ],
)
def test_a_diagnosis_is_said_in_a_line(
    deviations: tuple[str, ...], wrong: int, explained: float, said: str
) -> None:
    trial = TrialResult("TAIL", FINALIZE, "x", "test_tail", VIOLATES)
    made = replace(trial, deviations=deviations, wrong=wrong, explained=explained)
    assert diagnosis(made) == said


def test_the_page_shows_each_violation_whole(page: Element, distributed: Results) -> None:
    sections = list(page.all("section", class_="violation"))
    assert len(sections) == len(distributed.violations) == 2
    for section, violation in zip(sections, distributed.violations, strict=True):
        broken = rule(violation.rule)
        for part in (broken.statement, broken.source, broken.breaks, violation.found):
            assert " ".join(part.split()) in section.text
        for part in (violation.case, violation.repeat, diagnosis(violation)):
            assert part in section.text
        first = violation.evidence[0]["first"]
        table = next(section.all("table", class_="elements"))
        (body,) = table.all("tbody")
        rows = [[cell.text for cell in row.all("td")] for row in body.all("tr")]
        assert len(rows) == len(first)
        assert rows[0][1:3] == first[0]["got"]
        assert rows[0][3:5] == first[0]["lo"]
    links = [link.attributes["href"] for link in page.all("a")]
    assert links == [f"#{section.attributes['id']}" for section in sections]


def test_the_page_shows_ranks_side_by_side(page: Element) -> None:
    (section,) = page.all("section", id="own-1-gather")
    figures = [figure.text for figure in section.all("figure")]
    assert len(figures) == 3
    assert "Rank 0: 256 of 1,792 wrong, in token 6, columns 0 to 255" in figures[0]
    assert "Rank 1: all 1,792 conform" in figures[1]
    for picture in section.all("svg"):
        assert picture.attributes["role"] == "img"
        assert "tokens by hidden" in picture.attributes["aria-label"]
        assert len(list(picture.all("line", class_="block"))) == 2  # ceil(7 / 3) = 3 tokens each
    # What a colour says is said in words and numbers too.
    (bands,) = section.all("table", class_="bands")
    assert bands.text.endswith("4,096 ulps or more 512")
    assert "Divides rounding down" in section.text


def test_the_page_escapes_what_it_shows(page: Element, distributed: Results) -> None:
    (header,) = page.all("header")
    assert distributed.implementation in header.text
    assert not list(page.all("b"))
    assert not list(page.all("here"))
    assert "Traceback <b>" in page.text
    assert "there is no GPU <here>" in page.text


def test_the_matrix_counts_cases(page: Element, distributed: Results) -> None:
    (matrix,) = page.all("table", class_="matrix")
    columns = [cell.text for cell in next(matrix.all("thead")).all("th")]
    rows = {
        next(row.all("th")).text: [cell.text for cell in row.all("td")] for row in matrix.all("tr")
    }
    cell = distributed.matrix()["ROUND-2"][FINALIZE]
    shown = rows["ROUND-2"][columns.index("finalize") - 1]
    assert shown == f"violates: ✗ {cell.violations} of {cell.trials}"
    assert rows["ROUND-2"][columns.index("moe output") - 1] == "not provided: –"
    assert rows["ROUND-2"][columns.index("boundary") - 1] == "does not apply"
    assert rows["ROUND-1"][columns.index("finalize") - 1] == "not judged: ?"
    assert rows["OWN-1"][columns.index("gather") - 1] == "violates: ✗ 1 of 1"


def test_a_page_without_violations(results: Results) -> None:
    good = [trial for trial in results.trials if trial.status == CONFORMS]
    root = Page(report_html(replace(results, trials=good, planned=len(good)))).root
    assert next(root.all("h1")).text == "Conforms"
    assert not list(root.all("section"))
    root = Page(report_html(replace(results, trials=[], planned=0, provided=()))).root
    assert next(root.all("h1")).text == "Nothing was judged"


def test_the_smallest_case_and_a_larger_picture(distributed: Results) -> None:
    own = distributed.trials[-2]
    lo = torch.zeros(1, 256, dtype=torch.bfloat16)
    small = replace(
        own,
        case=f"{GATHER}/normal/T1-K2-H256/seed:1+ranks:3",
        elements=3 * 512,
        evidence=evidence(*(output(lo + 1, lo, lo, rank=rank) for rank in range(3))),
    )
    both = replace(distributed, trials=[own, small])
    (section,) = Page(report_html(both)).root.all("section")
    assert (
        "The smallest that fails. 1 token, 2 routes each, hidden size 256, 3 ranks" in section.text
    )
    assert f"In a larger case that fails: {own.case}" in section.text
    assert "in token 6" in next(section.all("figure")).text


# --- summary, badge, files ------------------------------------------------------------------------


def test_the_summary_is_markdown_that_nothing_breaks_out_of(distributed: Results) -> None:
    text = summary_markdown(distributed)
    lines = text.splitlines()
    assert lines[0].startswith("### ❌ Violates ")
    assert "OWN-1" in lines[0]
    # The name has a backtick, so that its code span needs two.
    assert f"`` {distributed.implementation} ``" in lines[0]
    start = lines.index(next(line for line in lines if line.startswith("| rule |")))
    table = [line for line in lines[start:] if line.startswith("|")]
    matrix = table[: lines[start:].index("")]
    assert {line.count("|") for line in matrix} == {4}
    assert "**✗ 1 of 1**" in text
    assert "there is no GPU \\<here\\>" in text
    assert text.count("<details>") == text.count("</details>") == 3
    for violation in distributed.violations:
        assert violation.repeat in text


def test_summaries_are_appended(tmp_path: Path, results: Results) -> None:
    path = tmp_path / "summary.md"
    path.write_text("before\n", encoding="utf-8")
    append_summary(results, path)
    append_summary(results, path)
    text = path.read_text(encoding="utf-8")
    assert text.startswith("before\n###")
    assert text.count("\n### ") == 2


def test_a_summary_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--summary: .*nowhere.*; allowed: a file"):
        check_summary(tmp_path / "nowhere" / "summary.md")


def test_the_badge_claims_no_more_than_was_judged(results: Results, distributed: Results) -> None:
    def badge(of: Results) -> dict[str, Any]:
        made: dict[str, Any] = json.loads(badge_json(of))
        assert made.keys() == {"schemaVersion", "label", "message", "color"}
        assert made["schemaVersion"] == 1
        return made

    assert badge(distributed)["message"].startswith("violates ")
    assert "OWN-1" in badge(distributed)["message"]
    assert badge(distributed)["color"] == "red"
    conforming = [t for t in results.trials if t.status == CONFORMS]
    good = replace(results, trials=conforming, planned=len(conforming))
    assert badge(good)["message"] == "conforms (1 of 9 operations, 3 of 34 rules)"
    assert badge(good)["color"] == "brightgreen"
    assert badge(replace(good, planned=len(conforming) + 1))["message"] == "not completed"
    assert badge(replace(results, trials=[], planned=0))["message"] == "nothing judged"
    assert badge(replace(results, trials=[], stopped="interrupted"))["message"] == "not completed"


def test_a_report_is_a_folder_of_files(tmp_path: Path, results: Results) -> None:
    write_report(results, tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"report.html", "report.json", "junit.xml", "badge.json"}
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["violations"][0]["evidence"][0]["first"]


def test_a_dump_has_a_page_and_no_badge(tmp_path: Path, distributed: Results) -> None:
    own = distributed.trials[-2]
    dump = replace(own, case="dumps/a b.safetensors dumps/c.safetensors", repeat="")
    write_report(replace(distributed, plan={"profile": "dump"}, trials=[dump]), tmp_path)
    assert {one.name for one in tmp_path.iterdir()} == {"report.html", "report.json", "junit.xml"}
    (section,) = Page((tmp_path / "report.html").read_text(encoding="utf-8")).root.all("section")
    assert dump.case in section.text
    assert "repeat" not in [item.text for item in section.all("dt")]
    assert len(list(section.all("figure"))) == 3


def test_check_writes_page_and_summary(tmp_path: Path) -> None:
    (tmp_path / ODD).write_text(BROKEN, encoding="utf-8")
    words = ("check", ODD, "--rule", "ROUND-2", "--report", "out", "--summary", "summary.md")
    done = subprocess.run(
        [sys.executable, "-m", "moetail.conformance.cli", *words],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    root = Page((tmp_path / "out/report.html").read_text(encoding="utf-8")).root
    assert next(root.all("h1")).text == "Violates ROUND-2"
    assert ODD in next(root.all("header")).text
    assert "Violates ROUND-2" in (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert (tmp_path / "out/junit.xml").exists()
    assert json.loads((tmp_path / "out/badge.json").read_text(encoding="utf-8"))["color"] == "red"
