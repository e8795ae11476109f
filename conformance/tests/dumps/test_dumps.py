"""Dumps: what is saved is what was called, a cut call is a call, and damage is told from faults."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import types
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

from conformance.tests.dumps.calls import LOCAL, case, saved
from moetail.conformance.cases import Case
from moetail.conformance.cases.tensors import tensors_in
from moetail.conformance.cli import main
from moetail.conformance.diagnosis import simulate
from moetail.conformance.dumps import (
    Capture,
    DumpError,
    Mapped,
    capture,
    install,
    judge_dumps,
    judge_files,
    load_dump,
)
from moetail.conformance.implementation import UsageError
from moetail.conformance.judge import judge
from moetail.conformance.run.call import same_bits
from moetail.reference import BeamAllReduceWorkspace, Reference
from moetail.spec import BEAM
from moetail.spec.rules import ALLREDUCE, GATHER, operation

# --- what is saved --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOCAL)
def test_a_call_is_saved_bit_for_bit_and_conforms(tmp_path: Path, name: str) -> None:
    one = case(name)
    path = saved(tmp_path, Reference(), one)
    dump = load_dump(path)
    assert dump.operation == one.operation
    expected, found = dict(tensors_in(one.arguments())), dict(tensors_in(dump.arguments))
    expected.pop("output", None)  # a destination's old values mean nothing: only its shape is kept
    assert found.keys() - {"output"} == expected.keys()
    assert all(same_bits(tensor, found[key]) for key, tensor in expected.items())
    due = dict(tensors_in(getattr(Reference(), one.operation)(**one.arguments())))
    got = dict(tensors_in(dump.result))
    assert due.keys() == got.keys()
    assert all(same_bits(tensor, got[key]) for key, tensor in due.items())
    scalars = {key: value for key, value in one.arguments().items() if isinstance(value, float)}
    assert {key: dump.arguments[key] for key in scalars} == scalars
    results = judge_dumps([dump])
    assert results.verdict == "conforms", results.violations
    assert results.judged >= sum(tensor.numel() for tensor in due.values())


@pytest.mark.parametrize("value", [0.1, -0.0, 5e-324, 1e-45, math.inf, math.nan, 2.0**1000 + 1])
def test_numbers_are_kept_exactly(tmp_path: Path, value: float) -> None:
    def function(x: Tensor, scale: float) -> Tensor:
        return x

    owner = types.SimpleNamespace(function=function)
    arguments = {
        "expert_outputs": "x",
        "expert_weights": "x",
        "output": "x",
        "routed_scale": "scale",
    }
    with capture(
        tmp_path, mapped=[Mapped(owner, "function", "beam_moe_finalize", arguments)]
    ) as made:
        owner.function(torch.zeros(1), value)
    found = load_dump(made.files[0]).arguments["routed_scale"]
    assert found.hex() == value.hex()
    assert math.copysign(1.0, found) == math.copysign(1.0, value)


def test_strides_are_kept_and_refused_where_the_contract_refuses_them(tmp_path: Path) -> None:
    one = case("boundary")
    arguments = one.arguments()
    wide = torch.zeros(5, 300, dtype=torch.bfloat16)
    wide[:, :256] = arguments["x"]
    arguments["x"] = wide[:, :256]
    arguments["residual"] = arguments["residual"][:1].expand(5, 256)
    owner = types.SimpleNamespace(beam_norm_residual_norm=lambda **given: (given["x"], None))
    with capture(tmp_path, owner) as made:
        owner.beam_norm_residual_norm(**arguments)
    dump = load_dump(made.files[0])
    assert dump.arguments["x"].stride() == (300, 1)
    assert dump.arguments["residual"].stride() == (0, 1)
    assert same_bits(dump.arguments["x"], arguments["x"])
    assert same_bits(dump.arguments["residual"], arguments["residual"])
    (violation,) = judge_dumps([dump]).violations
    assert violation.rule == "DOMAIN-1"
    assert "contiguous" in violation.found


def test_a_call_is_saved_as_it_was_before_a_kernel_wrote_into_it(tmp_path: Path) -> None:
    class Writes(Reference):
        def beam_norm_residual_norm(self, x: Tensor, residual: Tensor, **rest: Any) -> Any:
            made = super().beam_norm_residual_norm(x, residual, **rest)
            residual.copy_(made[0])
            return made

    one = case("boundary")
    kernel, arguments = Writes(), one.arguments()
    with capture(tmp_path, kernel) as made:
        kernel.beam_norm_residual_norm(**arguments)
    dump = load_dump(made.files[0])
    assert same_bits(dump.arguments["residual"], one.arguments()["residual"])
    assert dump.changed == ("residual",)
    results = judge_dumps([dump])
    assert [trial.rule for trial in results.violations] == ["RUN-2"]
    assert "residual" in results.violations[0].found


# --- some tokens ----------------------------------------------------------------------------------


class OneToken(Reference):
    """Wrong in token 3 alone."""

    def finalize_moe_output(self, x: Any) -> Tensor:
        made = super().finalize_moe_output(x).clone()
        made[3, 17] += 1.0
        return made


@pytest.mark.parametrize(
    ("tokens", "verdict"), [(None, "violates"), ([0, 3], "violates"), ([0, 1, 4], "conforms")]
)
def test_chosen_tokens_are_judged_and_named(
    tmp_path: Path, tokens: list[int] | None, verdict: str
) -> None:
    results = judge_files([saved(tmp_path, OneToken(), case("permuted"), tokens=tokens)])
    assert results.verdict == verdict
    for violation in results.violations:
        row = 3 if tokens is None else 1
        assert f"output[{row}, 17]" in violation.found
        assert ("row 1 is token 3 of 5" in violation.found) == (tokens is not None)


def test_padding_is_not_saved_with_chosen_tokens(tmp_path: Path) -> None:
    one = case("permuted")
    dump = load_dump(saved(tmp_path, Reference(), one, tokens=[2]))
    x, whole = dump.arguments["x"].routed, one.arguments()["x"].routed
    live = int((whole.expanded_idx_to_permuted_idx[2] >= 0).sum())
    assert 0 < x.gemm2_permuted.shape[0] == live < whole.gemm2_permuted.shape[0]


def test_calls_without_a_chosen_token_are_passed_over(tmp_path: Path) -> None:
    kernel, one = Reference(), case("boundary")
    with capture(tmp_path, kernel, tokens=[5], calls=range(2)) as made:
        kernel.beam_norm_residual_norm(**one.arguments())  # tokens 0 to 4
        kernel.beam_norm_residual_norm(**one.replace(tokens=6).arguments())
    (dump,) = map(load_dump, made.files)
    assert (dump.call, dump.num_tokens, dump.tokens) == (1, 6, (5,))


# --- what is wrapped ------------------------------------------------------------------------------


def test_functions_are_put_back(tmp_path: Path) -> None:
    module = types.ModuleType("tail")
    module.finalize_moe_output = before = Reference().finalize_moe_output  # type: ignore[attr-defined]
    kernel = Reference()
    with capture(tmp_path, module, kernel):
        assert module.finalize_moe_output is not before
        assert "finalize_moe_output" in vars(kernel)
    assert module.finalize_moe_output is before
    assert not vars(kernel)
    with pytest.raises(ZeroDivisionError), capture(tmp_path, module, kernel):
        _ = 1 / 0
    assert module.finalize_moe_output is before
    assert not vars(kernel)


def test_the_outermost_call_alone_is_saved_and_only_those_asked_for(tmp_path: Path) -> None:
    class Nested(Reference):
        def beam_moe_finalize_norm_residual_norm(self, *args: Any, **kwargs: Any) -> Any:
            self.finalize_moe_output(case("finalized").arguments()["x"])
            return super().beam_moe_finalize_norm_residual_norm(*args, **kwargs)

    kernel = Nested()
    with capture(tmp_path, kernel, calls=(0, 2)) as made:
        for _ in range(4):
            kernel.beam_moe_finalize_norm_residual_norm(**case("fused").arguments())
    assert [path.name for path in made.files] == [
        f"beam_moe_finalize_norm_residual_norm-000{call}-rank0of1-{os.getpid()}.safetensors"
        for call in (0, 2)
    ]
    with capture(tmp_path / "b", kernel, operations=["moe output"]) as made:
        kernel.beam_moe_finalize_norm_residual_norm(**case("fused").arguments())
    assert [load_dump(path).operation for path in made.files] == ["finalize_moe_output"]


def test_a_class_can_be_wrapped_before_its_objects_are_made(tmp_path: Path) -> None:
    class Mine(Reference):
        def finalize_moe_output(self, x: Any) -> Tensor:
            return super().finalize_moe_output(x)

    with capture(tmp_path, Mine) as made:
        Mine().finalize_moe_output(case("permuted").arguments()["x"])
    assert judge_files(made.files).verdict == "conforms"


def add_norm(out: Tensor, x: Tensor, skip: Tensor, gain: Tensor, eps: float = 1e-6) -> None:
    """Somebody's function: residual in place, results through parameters."""
    skip.add_(x)
    values = {"rows": skip, "next_weight": gain, "next_eps": eps}
    out.copy_(Reference().through(["next norm"], values))


MAPPING: dict[str, Any] = {
    "x": "x",
    "residual": "skip",
    "post_weight": lambda given: None,
    "post_eps": lambda given: None,
    "next_weight": "gain",
    "next_eps": "eps",
    "scales": lambda given: None,
}


def test_any_function_can_be_mapped(tmp_path: Path) -> None:
    owner = types.SimpleNamespace(add_norm=add_norm)
    mapped = Mapped(
        owner,
        "add_norm",
        "boundary",
        MAPPING,
        result=lambda value, given: (given["skip"], given["out"]),
    )
    gen = torch.Generator().manual_seed(0)
    x, skip = torch.randn(2, 4, 256, generator=gen).bfloat16()
    gain = torch.rand(256, generator=gen).bfloat16()
    with capture(tmp_path, mapped=[mapped]) as made:
        owner.add_norm(torch.empty_like(x), x, skip.clone(), gain=gain)
    dump = load_dump(made.files[0])
    assert same_bits(dump.arguments["residual"], skip)
    assert dump.arguments["next_eps"] == 1e-6
    results = judge_dumps([dump])
    assert results.verdict == "conforms"
    assert results.judged == 2 * x.numel()
    assert [trial.rule for trial in results.trials] == ["TAIL"]  # it may write where it likes
    assert "add_norm" in results.implementation


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"operation": "boundry"}, "boundry"),
        ({"operation": "BeamAllReduceWorkspace"}, "computes nothing"),
        ({"name": "norm"}, "norm"),
        ({"arguments": {**MAPPING, "y": "x"}}, "no argument y"),
        ({"arguments": {**MAPPING, "x": "rows"}}, "no parameter rows"),
        ({"arguments": {"x": "x"}}, "leaves out residual"),
    ],
)
def test_a_mapping_that_does_not_fit_is_usage(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    owner = types.SimpleNamespace(add_norm=add_norm)
    mapped = dataclasses.replace(Mapped(owner, "add_norm", "boundary", MAPPING), **changes)
    with pytest.raises(UsageError, match=said), capture(tmp_path, mapped=[mapped]):
        pass
    assert owner.add_norm is add_norm


def test_a_target_without_operations_is_usage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="provides none"), capture(tmp_path, object()):
        pass


def test_the_environment_is_the_switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = types.SimpleNamespace(finalize_moe_output=Reference().finalize_moe_output)
    before, x = owner.finalize_moe_output, case("permuted").arguments()["x"]
    monkeypatch.delenv("MOETAIL_CAPTURE", raising=False)
    assert install(owner).folder is None
    assert owner.finalize_moe_output is before
    monkeypatch.setenv("MOETAIL_CAPTURE", str(tmp_path / "deep" / "dumps"))
    monkeypatch.setenv("MOETAIL_CAPTURE_CALLS", "0,2:4")
    monkeypatch.setenv("MOETAIL_CAPTURE_TOKENS", "1:3, 4")
    made = install(owner)
    for _ in range(6):
        owner.finalize_moe_output(x)
    made.close()
    dumps = [load_dump(path) for path in sorted((tmp_path / "deep" / "dumps").iterdir())]
    assert [dump.call for dump in dumps] == [0, 2, 3]
    assert {dump.tokens for dump in dumps} == {(1, 2, 4)}
    monkeypatch.setenv("MOETAIL_CAPTURE_TOKENS", "1-3")
    with pytest.raises(UsageError, match=r"MOETAIL_CAPTURE_TOKENS: '1-3'"):
        install(owner)


# --- verdicts -------------------------------------------------------------------------------------


class ScalesFirst(Reference):
    """Multiplies before the first rounding (ROUND-2)."""

    contract = BEAM.edit("round", rounds=None)


def test_a_broken_kernel_is_told_its_rule_and_as_many_elements_as_by_the_judge(
    tmp_path: Path,
) -> None:
    one = case("permuted").replace(tokens=40)
    results = judge_files([saved(tmp_path, ScalesFirst(), one)])
    verdict = judge(
        one.operation, [one.arguments()], [ScalesFirst().finalize_moe_output(**one.arguments())]
    )
    assert verdict.wrong > 0
    (violation,) = results.violations
    assert violation.rule == "ROUND-2"
    assert violation.deviations == ("scale-before-rounding",)
    assert f"({verdict.wrong} of {verdict.judged} elements wrong)" in violation.found
    assert violation.repeat.startswith("moetail judge ")
    assert violation.evidence[0]["wrong"] == verdict.wrong


@pytest.mark.parametrize(
    ("changes", "rules"),
    [
        ({}, []),
        ({"gemm2_permuted": torch.clone}, ["CONVERT-3"]),
        ({"expanded_idx_to_permuted_idx": lambda index: index.clamp(min=0)}, ["PACK-3"]),
        ({"route_major": lambda flag: not flag}, ["PACK-3"]),
        ({"expert_weights": lambda weights: weights * 2}, ["CONVERT-1"]),
    ],
)
def test_conversions_are_compared_with_what_they_were_given(
    tmp_path: Path, changes: dict[str, Any], rules: list[str]
) -> None:
    def convert(**given: Any) -> Any:
        made = Reference().route_major_moe_output(**given)
        new = {name: change(getattr(made, name)) for name, change in changes.items()}
        return dataclasses.replace(made, **new)

    owner = _owner("route_major_moe_output", convert)
    results = judge_files([saved(tmp_path, owner, case("route-major"))])
    assert [trial.rule for trial in results.violations] == rules


def _owner(name: str, function: Any) -> Any:
    return types.SimpleNamespace(**{name: function})


def _raises(**given: Any) -> Any:
    raise ValueError("no")


def _writes_and_raises(**given: Any) -> Any:
    given["residual"].zero_()
    raise ValueError("no")


@pytest.mark.parametrize(
    ("function", "hidden", "rules"),
    [
        (_raises, 256, ["TAIL"]),
        (_raises, 255, []),  # a refusal where one is due
        (_writes_and_raises, 255, ["DOMAIN-2"]),
        (lambda **given: (given["x"], None), 255, ["DOMAIN-1"]),
    ],
)
def test_refusals(tmp_path: Path, function: Any, hidden: int, rules: list[str]) -> None:
    arguments = case("fused").arguments()
    arguments["residual"] = torch.ones(5, hidden, dtype=torch.bfloat16)
    owner = _owner("beam_moe_finalize_norm_residual_norm", function)
    with capture(tmp_path, owner) as made, contextlib.suppress(ValueError):
        owner.beam_moe_finalize_norm_residual_norm(**arguments)
    results = judge_files(made.files)
    assert [trial.rule for trial in results.violations] == rules
    assert results.exit_code == (1 if rules else 0)
    if rules == ["TAIL"]:
        assert "raised on legal arguments: ValueError: no" in results.violations[0].found
        assert "in _raises" in results.violations[0].trace


def test_an_illegal_call_is_saved_whole_where_it_cannot_be_cut(tmp_path: Path) -> None:
    arguments = case("fused").arguments()
    x = arguments["x"]
    arguments["x"] = dataclasses.replace(x, gemm2_permuted=x.gemm2_permuted[:-1])
    owner = _owner("beam_moe_finalize_norm_residual_norm", _raises)
    with capture(tmp_path, owner, tokens=[1]) as made, pytest.raises(ValueError, match="no"):
        owner.beam_moe_finalize_norm_residual_norm(**arguments)
    dump = load_dump(made.files[0])
    assert dump.tokens is None
    assert judge_dumps([dump]).verdict == "conforms"


def test_another_tensor_than_the_destination_is_told(tmp_path: Path) -> None:
    owner = _owner(
        "beam_moe_finalize", lambda **given: Reference().beam_moe_finalize(**given).clone()
    )
    results = judge_files([saved(tmp_path, owner, case("finalize"))])
    assert [trial.rule for trial in results.violations] == ["RUN-3"]


def test_no_tokens(tmp_path: Path) -> None:
    empty = case("boundary").replace(tokens=0)
    results = judge_files([saved(tmp_path, Reference(), empty)])
    assert (results.verdict, results.trials[-1].rule) == ("conforms", "LIVE-2")
    owner = _owner("beam_norm_residual_norm", lambda **given: (given["x"], None))
    results = judge_files([saved(tmp_path / "b", owner, empty)])
    assert results.verdict == "violates"
    assert "normalized is None" in results.violations[0].found


# --- ranks ----------------------------------------------------------------------------------------


def _ranks(folder: Path, one: Case, changed: Any = None, **options: Any) -> list[Path]:
    """A distributed call, each rank's with a workspace of its own, as files."""
    calls = [one.arguments(rank) for rank in range(one.ranks)]
    results = simulate(Reference, one.operation, calls)
    paths = []
    for rank, (call, result) in enumerate(zip(calls, results, strict=True)):
        if changed is not None:
            changed(rank, call, result)
        workspace = BeamAllReduceWorkspace(one.ranks, rank, one.hidden, one.tokens, None)  # type: ignore[arg-type]
        owner = _owner(one.operation, lambda result=result, **given: result)
        with capture(folder, owner, **options) as made:
            getattr(owner, one.operation)(**call, workspace=workspace)
        paths += made.files
    return paths


@pytest.mark.parametrize("name", [GATHER, ALLREDUCE])
def test_the_files_of_all_ranks_are_judged_together(tmp_path: Path, name: str) -> None:
    one = Case(name, tokens=5, ranks=3, top_k=2, hidden=256, next="affine")
    assert operation(name).distributed
    paths = _ranks(tmp_path, one)
    assert [path.name.split("-")[2] for path in paths] == [f"rank{r}of3" for r in range(3)]
    results = judge_files(paths[::-1])
    assert results.verdict == "conforms", results.violations
    assert {trial.rule for trial in results.trials} == {"RUN-2", "OWN-3", "TAIL"}
    assert results.trials[-1].judged == 3 * 2 * 5 * 256
    with pytest.raises(DumpError, match=r"without rank 1 of 3; allowed: the files of all ranks"):
        judge_files([paths[0], paths[2]])
    with pytest.raises(DumpError, match="one file for each rank"):
        judge_files([*paths, paths[1]])
    tokens = _ranks(tmp_path / "cut", one, tokens=[4])
    assert judge_files(tokens).verdict == "conforms"


def test_ranks_that_differ_are_told(tmp_path: Path) -> None:
    one = Case(GATHER, tokens=5, ranks=2, top_k=2, hidden=256)

    def other_bits(rank: int, call: Any, result: Any) -> None:
        if rank == 1:
            result[0][4, 7] = 77.0

    results = judge_files(_ranks(tmp_path / "a", one, other_bits))
    assert results.violations[0].rule == "OWN-3"
    assert "rank 1's hidden has other bits" in results.violations[0].found
    assert any("rank 1: hidden[4, 7]" in trial.found for trial in results.violations)

    def other_residual(rank: int, call: Any, result: Any) -> None:
        if rank == 1:
            call["residual"][0, 0] += 1

    paths = _ranks(tmp_path / "b", one, other_residual)
    with pytest.raises(DumpError, match="another residual than on rank 0") as error:
        judge_files(paths)
    assert str(paths[1]) in str(error.value)


# --- the command line -----------------------------------------------------------------------------


def _judge(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["judge", *map(str, words)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_command_has_the_exit_codes_and_reports_of_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = saved(tmp_path / "good", Reference(), case("permuted"))
    bad = saved(tmp_path / "bad", ScalesFirst(), case("permuted").replace(tokens=20))
    assert _judge(good) == 0
    assert "CONFORMS: " in capsys.readouterr().out
    summary = tmp_path / "summary.md"
    assert _judge(bad, "--report", tmp_path / "report", "--summary", summary) == 1
    printed = capsys.readouterr().out
    assert "ROUND-2 violated by finalize_moe_output" in printed
    assert "not provided: " not in printed
    report = json.loads((tmp_path / "report" / "report.json").read_text(encoding="utf-8"))
    assert report["violations"][0]["rule"] == "ROUND-2"
    assert report["provided"] == ["finalize_moe_output"]
    assert report["plan"]["profile"] == "dump"
    assert "torch" in report["plan"]["captured"]
    assert (tmp_path / "report" / "report.html").stat().st_size > 1000
    suite = ElementTree.parse(tmp_path / "report" / "junit.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    (failed,) = suite.iterfind("testcase[failure]")
    assert failed.get("classname") == "moetail.ROUND-2"
    assert failed.get("name") == f"test_tail_on_any_case[{bad}]"
    assert _judge(good, "--summary", summary) == 0  # appended
    text = summary.read_text(encoding="utf-8")
    assert text.index("### ❌ Violates ROUND-2: ") < text.index("### ✅ Conforms: ")
    assert f"moetail judge {bad}" in text
    capsys.readouterr()
    assert _judge(good, "--summary", tmp_path) == 2
    assert "--summary: " in capsys.readouterr().err
    assert _judge(good, tmp_path / "nowhere") == 2
    said = capsys.readouterr()
    assert "nowhere: found No such file" in said.err
    assert "Traceback" not in said.err + said.out


def test_a_file_of_any_name_is_judged_and_shown_harmlessly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path / "bad", ScalesFirst(), case("permuted").replace(tokens=20))
    odd = path.rename(tmp_path / "red\x1b[31m [bold]<b>\n.safetensors")
    report, summary = tmp_path / "report", tmp_path / "summary.md"
    assert _judge(odd, "--report", report, "--summary", summary) == 1
    printed = capsys.readouterr().out
    for text in (printed, *(one.read_text("utf-8") for one in (summary, *report.iterdir()))):
        assert "\x1b" not in text
    shown = r"red\x1b[31m [bold]<b>\n.safetensors"
    assert shown in printed
    assert shown in summary.read_text(encoding="utf-8")
    (failed,) = ElementTree.parse(report / "junit.xml").iterfind(".//testcase[failure]")
    assert shown in str(failed.get("name"))


def test_the_command_ends_with_3_where_nothing_can_be_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Sums that overflow to either infinity, or to neither, by the order: any result may be legal.
    arguments = case("fused").replace(tokens=1, top_k=4, next="none", capacity=0).arguments()
    arguments["x"].gemm2_permuted.copy_(torch.tensor([[3e38], [3e38], [-3e38], [-3e38]]))
    arguments["x"].expert_weights.fill_(1.0)
    kernel = Reference()
    with capture(tmp_path, kernel) as made:
        kernel.beam_moe_finalize_norm_residual_norm(**arguments)
    assert isinstance(made, Capture)
    assert _judge(*made.files) == 3
    printed = capsys.readouterr().out
    assert "NOTHING WAS JUDGED" in printed
    assert "depends on a legal choice" in printed
