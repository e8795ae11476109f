"""Adapters: where the file is found, that nothing else is loaded, and what the suite then says.

The packages here are stand-ins, written into a folder as pip would unpack them. Where the real ones
are at hand, the committed reports are reproduced.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moetail.conformance import implementation
from moetail.conformance.adapters import ADAPTERS, not_mapped, versions
from moetail.conformance.implementation import UsageError, load
from moetail.conformance.run.plan import Plan
from moetail.conformance.run.results import Results
from moetail.conformance.suite import run_suite
from moetail.spec import OPERATIONS, UnfinalizedMoEOutput
from moetail.spec.rules import BOUNDARY, ROUTE_MAJOR

# As given, before a fixture hides it from the tests with stand-ins.
ENVIRONMENT = {name: os.environ.get(f"MOETAIL_{name.upper()}", "") for name in ADAPTERS}

REPORTS = Path(__file__).parents[2] / "results"

VLLM = """
from dataclasses import dataclass

import torch
from moetail.reference import Reference


@dataclass
class UnfinalizedMoEOutput:
    gemm2_permuted: torch.Tensor
    expert_weights: torch.Tensor
    expanded_idx_to_permuted_idx: torch.Tensor
    route_major: bool = False


@dataclass
class MoEOutput:
    routed: torch.Tensor | UnfinalizedMoEOutput
    shared_output: torch.Tensor | None = None
    routed_scaling_factor: float = 1.0


def theirs(made):
    return UnfinalizedMoEOutput(**vars(made)) if hasattr(made, "route_major") else made


def route_major_moe_output(routes, topk_weights, topk_ids, expert_map):
    return theirs(
        Reference().route_major_moe_output(routes, topk_weights, topk_ids, expert_map)
    )


def convert_flashinfer_moe_output(flashinfer_output, **options):
    return theirs(Reference().convert_flashinfer_moe_output(flashinfer_output, **options))
"""

# A file that could not be run whole, as the real one cannot without its package.
FLASHINFER = """
from ..template import TraceTemplate


@torch.no_grad()
def _allreduce_fusion_reference(
    input, workspace, pattern, residual_out=None, norm_out=None, residual_in=None, rms_gamma=None,
    rms_eps=1e-6, **_unused
):
    assert pattern == 1
    pre = input.float() + residual_in.float()
    residual_out.copy_(pre)
    ROUNDED
    norm_out.copy_(pre * torch.rsqrt(pre.square().mean(-1, keepdim=True) + rms_eps) * rms_gamma)


trace = TraceTemplate(reference=_allreduce_fusion_reference)
"""

FILES = {
    "vllm": "vllm/model_executor/layers/fused_moe/moe_output.py",
    "flashinfer": "flashinfer/trace/templates/comm.py",
}
DISTRIBUTIONS = {"vllm": "vllm", "flashinfer": "flashinfer-python"}
TEXTS = {"vllm": VLLM, "flashinfer": FLASHINFER.replace("ROUNDED", "pre = residual_out.float()")}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ADAPTERS:
        monkeypatch.delenv(f"MOETAIL_{name.upper()}", raising=False)
    yield
    _forget()


def _forget() -> None:
    load.cache_clear()
    for module in ADAPTERS.values():
        sys.modules.pop(module, None)


def unpacked(folder: Path, name: str, text: str | None = None, release: str = "9.8.7") -> Path:
    """A folder with the package as pip would unpack it; importing it is an error."""
    file = folder / FILES[name]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(TEXTS[name] if text is None else text, encoding="utf-8")
    (folder / name / "__init__.py").write_text("raise ImportError('no engine here')", "utf-8")
    info = folder / f"{DISTRIBUTIONS[name].replace('-', '_')}-{release}.dist-info"
    info.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {DISTRIBUTIONS[name]}\nVersion: {release}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    return folder


def chosen(monkeypatch: pytest.MonkeyPatch, name: str, place: Path) -> Any:
    _forget()
    monkeypatch.setenv(f"MOETAIL_{name.upper()}", str(place))
    return load(name).target


def judged(name: str, operation: str, *rules: str) -> Results:
    return run_suite(name, Plan(), operations=[operation], rules=rules)


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_folder_a_wheel_and_an_installed_package_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = unpacked(tmp_path / "tree", name)
    wheel = tmp_path / "any-name.whl"
    with zipfile.ZipFile(wheel, "w") as made:
        for path in folder.rglob("*"):
            made.write(path, path.relative_to(folder))
    for place in (folder, wheel):
        assert versions(chosen(monkeypatch, name, place)) == {DISTRIBUTIONS[name]: "9.8.7"}
    _forget()
    monkeypatch.delenv(f"MOETAIL_{name.upper()}")
    monkeypatch.syspath_prepend(str(unpacked(tmp_path / "installed", name, release="1.2.3")))
    before = set(sys.modules)
    assert versions(load(name).target) == {DISTRIBUTIONS[name]: "1.2.3"}
    assert not [module for module in set(sys.modules) - before if module.split(".")[0] == name]


@pytest.mark.parametrize("name", ADAPTERS)
def test_what_is_not_mapped_is_said_for_every_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    target = chosen(monkeypatch, name, unpacked(tmp_path, name))
    provided = set(load(name).provided)
    assert provided
    assert provided | set(not_mapped(target)) == {item.name for item in OPERATIONS}
    assert not provided & set(not_mapped(target))


@pytest.mark.parametrize("name", ADAPTERS)
def test_what_is_not_there_is_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    variable = f"MOETAIL_{name.upper()}"
    (tmp_path / "file.whl").write_text("no wheel", encoding="utf-8")
    (tmp_path / "older").mkdir()
    old = unpacked(tmp_path / "old", name)
    (old / FILES[name]).unlink()
    for place, said in (
        (tmp_path / "file.whl", f"{variable}: .* is no folder and no wheel"),
        (tmp_path / "older", f"unknown has no {FILES[name]}"),
        (old, f"{DISTRIBUTIONS[name]} 9.8.7 has no {FILES[name]}"),
    ):
        with pytest.raises(UsageError, match=said):
            chosen(monkeypatch, name, place)
    monkeypatch.delenv(variable)
    if importlib.util.find_spec(name) is None:
        with pytest.raises(UsageError, match=f"{DISTRIBUTIONS[name]} is not installed; allowed: "):
            load(name)


def test_the_classes_must_be_the_contracts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for old, new in (
        ("route_major: bool = False", "route_major: bool = True"),
        ("shared_output: ", "shared: "),
        ("class MoEOutput", "class Other"),
    ):
        place = unpacked(tmp_path, "vllm", VLLM.replace(old, new))
        with pytest.raises(UsageError, match=r"vllm 9\.8\.7: .* has fields"):
            chosen(monkeypatch, "vllm", place)


def test_vllms_results_are_ours_without_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = chosen(monkeypatch, "vllm", unpacked(tmp_path, "vllm"))
    rows = torch.arange(24, dtype=torch.bfloat16).view(6, 4)
    weights = torch.rand(3, 2)
    made = target.route_major_moe_output(rows, weights, torch.zeros(3, 2, dtype=torch.int64), None)
    assert type(made) is UnfinalizedMoEOutput
    assert made.route_major is True
    assert made.gemm2_permuted.data_ptr() == rows.data_ptr()
    assert made.expert_weights is weights
    assert made.expanded_idx_to_permuted_idx.tolist() == [[0, 1], [2, 3], [4, 5]]
    finalized = target.convert_flashinfer_moe_output(
        [rows], do_finalize=True, num_tokens=6, top_k=1
    )
    assert finalized is rows


def test_the_suite_tells_a_right_vllm_from_a_wrong_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen(monkeypatch, "vllm", unpacked(tmp_path, "vllm"))
    results = judged("vllm", ROUTE_MAJOR, "PACK-1", "PACK-3", "CONVERT-3")
    assert results.verdict == "conforms", results.violations
    copied = VLLM.replace(
        "().route_major_moe_output(routes", "().route_major_moe_output(routes + 0"
    )
    assert copied != VLLM
    chosen(monkeypatch, "vllm", unpacked(tmp_path, "vllm", copied))
    results = judged("vllm", ROUTE_MAJOR, "PACK-3", "CONVERT-3")
    assert [trial.rule for trial in results.violations] == ["CONVERT-3"]


@pytest.mark.parametrize(
    ("rounding", "rules"),
    [("pre = residual_out.float()", []), ("", ["ROUND-6"])],
)
def test_the_suite_tells_where_flashinfer_norms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounding: str, rules: list[str]
) -> None:
    text = FLASHINFER.replace("ROUNDED", rounding)
    chosen(monkeypatch, "flashinfer", unpacked(tmp_path, "flashinfer", text))
    results = judged("flashinfer", BOUNDARY, "ROUND-4", "ROUND-5", "ROUND-6", "LIVE-2")
    # What follows the first may be its consequence.
    assert [trial.rule for trial in results.violations][:1] == rules
    assert results.judged > 0


def test_the_command_says_versions_and_what_is_not_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from moetail.conformance.cli import main

    _forget()
    monkeypatch.setenv("MOETAIL_VLLM", str(unpacked(tmp_path / "tree", "vllm")))
    words = ["check", "vllm", "--op", "route major", "--rule", "PACK-3"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--report", str(tmp_path / "report")])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "Not mapped: beam_moe_finalize: " in printed
    report = json.loads((tmp_path / "report" / "report.json").read_text(encoding="utf-8"))
    assert report["plan"]["vllm"] == "9.8.7"
    assert report["implementation"] == "vllm"


def test_adapters_are_named_where_an_implementation_is_not_found() -> None:
    with pytest.raises(UsageError, match="allowed: reference, kernels, vllm, flashinfer, a module"):
        implementation.load("no_such_module_of_anybody")


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_committed_report_is_that_of_the_released_package(name: str) -> None:
    text = (REPORTS / name / "report.json").read_text(encoding="utf-8")
    report = json.loads(text)
    assert report["implementation"] == name
    assert report["verdict"] in ("conforms", "violates")
    assert report["totals"]["judged"] > 0
    assert DISTRIBUTIONS[name] in report["plan"]
    assert "/work" not in text
    assert "/tmp" not in text


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_committed_report_is_reproduced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = ENVIRONMENT.get(name)
    if place:
        monkeypatch.setenv(f"MOETAIL_{name.upper()}", place)
    _forget()
    try:
        loaded = load(name)
    except UsageError as error:
        pytest.skip(str(error))
    report = json.loads((REPORTS / name / "report.json").read_text(encoding="utf-8"))
    found = versions(loaded.target)[DISTRIBUTIONS[name]]
    if found != report["plan"][DISTRIBUTIONS[name]]:
        pytest.skip(f"the report is on {report['plan'][DISTRIBUTIONS[name]]}, not {found}")
    wrong = {one["operation"]: one["rule"] for one in reversed(report["violations"])}
    results = run_suite(name, Plan())
    # The first rule of each operation: what follows may be its consequence.
    assert {one.operation: one.rule for one in reversed(results.violations)} == wrong
