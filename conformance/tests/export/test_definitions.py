"""Definitions: the code in them is the reference, bit for bit, and FlashInfer-Bench takes them."""

from __future__ import annotations

import builtins
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from moetail.conformance.cases import MODELS, Model
from moetail.conformance.cases.tensors import tensors_in
from moetail.conformance.cli import main
from moetail.conformance.diagnosis import simulate
from moetail.conformance.export.definitions import (
    FORMS,
    Form,
    case_of,
    definition,
    reference_code,
    values_of,
    write_definitions,
)
from moetail.conformance.export.source import torch_code
from moetail.conformance.implementation import UsageError
from moetail.conformance.run.call import same_bits
from moetail.reference import Reference
from moetail.spec import BEAM, operation
from moetail.spec.rules import OPERATIONS, WORKSPACE

by_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.operation + form.suffix)


def run_alone(code: str) -> Any:
    """``run`` of the code, where nothing of this project can be imported."""

    def without_moetail(name: str, *args: Any) -> Any:
        if name.split(".")[0] == "moetail":
            raise ImportError(name)
        return __import__(name, *args)

    names: dict[str, Any] = {
        "__name__": "standalone",
        "__builtins__": {**vars(builtins), "__import__": without_moetail},
    }
    exec(compile(code, "standalone", "exec", dont_inherit=True), names)
    return names["run"]


def due(form: Form, case: Any) -> list[Tensor]:
    """What the reference gives for the case, on the first rank."""
    calls = [case.arguments(rank) for rank in range(case.ranks)]
    return [tensor for _, tensor in tensors_in(simulate(Reference, form.operation, calls)[0])]


@by_form
@pytest.mark.parametrize("tokens", [1, 4, 7])
def test_the_code_is_the_reference_bit_for_bit(form: Form, tokens: int) -> None:
    # Numbers that FP32 does not hold.
    more = {"routed_scale": 2.827} if "routed_scale" in form.options else {}
    more |= {"scales": (0.7, 1.3)} if "scales" in form.options else {}
    case = case_of(form, tokens=tokens, top_k=3, hidden=256, seed=tokens, **more)
    values = values_of(form, [case.arguments(rank) for rank in range(case.ranks)])
    made = run_alone(reference_code(form))(*values.values())
    made = made if isinstance(made, tuple) else (made,)
    expected = due(form, case)
    assert len(made) == len(expected) == len(form.outputs)
    assert any(tensor.isfinite().all() and bool(tensor.any()) for tensor in expected)
    for left, right in zip(made, expected, strict=True):
        assert same_bits(left, right)


@by_form
def test_the_code_is_read_beside_the_contract(form: Form) -> None:
    code = reference_code(form)
    assert "moetail" not in code
    assert max(map(len, code.splitlines())) <= 100
    computes = bool(operation(form.operation).stages)
    formulas = ["# a = ", "# s = "] if "weights" in code and computes else []
    formulas += ["# n = "] if "post_eps" in form.inputs else []
    formulas += ["# hidden = ", "# normalized = "] if "residual" in form.inputs else []
    formulas += ["# p = "] if "shared_output" in form.inputs else []
    commented = [line.strip() for line in code.splitlines() if "#" in line]
    assert all(any(line.startswith(start) for line in commented) for start in formulas)
    run = inspect.signature(run_alone(code))
    assert list(run.parameters) == list(form.inputs)
    assert all(one.default is one.empty for one in run.parameters.values())
    # FlashInfer-Bench counts the outputs by the annotation.
    several = len(form.outputs) > 1
    assert run.return_annotation == (tuple[(Tensor,) * len(form.outputs)] if several else Tensor)


def test_a_contract_that_torch_does_not_round_is_refused() -> None:
    arguments = {"rows": "x", "residual": "residual"}
    for edited in (
        BEAM.each_rounding(mode="toward-zero"),
        BEAM.edit("next_inverse", eps="outside"),
    ):
        given = {**arguments, "next_eps": "next_eps", "next_weight": "next_weight"}
        with pytest.raises(ValueError, match=r"step (hidden|next_inverse)"):
            torch_code(operation("boundary"), given, edited)
    code = torch_code(operation("boundary"), arguments, BEAM.edit("hidden", rounds=None))
    assert "bfloat16" not in "".join(code)


@by_form
def test_a_definition_is_whole(form: Form) -> None:
    made = definition(form, top_k=3, hidden=256, experts=8)
    assert json.loads(json.dumps(made)) == made
    used = {
        axis
        for part in ("inputs", "outputs")
        for one in made[part].values()
        for axis in one["shape"] or ()
    }
    assert used == set(made["axes"])
    assert not set(made["inputs"]) & set(made["outputs"])
    bound = {axis for one in made["inputs"].values() for axis in one["shape"] or ()}
    variable = {axis for axis, one in made["axes"].items() if one["type"] == "var"}
    assert variable <= bound
    case = case_of(form, tokens=5, top_k=3, hidden=256)
    values = values_of(form, [case.arguments(rank) for rank in range(case.ranks)])
    sizes = {axis: one["value"] for axis, one in made["axes"].items() if one["type"] == "const"}
    for name, one in made["inputs"].items():
        if one["shape"] is None:
            assert isinstance(values[name], float)
            continue
        assert values[name].dtype is getattr(torch, one["dtype"])
        for axis, size in zip(one["shape"], values[name].shape, strict=True):
            assert sizes.setdefault(axis, size) == size, axis
    for name, tensor in zip(made["outputs"], due(form, case), strict=True):
        assert list(tensor.shape) == [sizes[axis] for axis in made["outputs"][name]["shape"]]
        assert tensor.dtype is getattr(torch, made["outputs"][name]["dtype"])
    assert all(eval(text, {}, sizes) for text in made["constraints"])


def test_every_operation_has_one_and_names_are_unique() -> None:
    computed = {item.name for item in OPERATIONS if item.name != WORKSPACE}
    assert {form.operation for form in FORMS} == computed
    names = [form.name(8, 4096) for form in FORMS]
    assert len(set(names)) == len(names)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    model = Model("tiny", 256, 8, 2, routed_scale=2.5, shared=True)
    monkeypatch.setitem(MODELS, "tiny", model)
    return "tiny"


def test_workloads_are_made_by_the_producers_and_the_same_each_time(
    tmp_path: Path, tiny: str
) -> None:
    told: list[str] = []
    paths = write_definitions(tmp_path / "a", model=tiny, tokens=(1, 3), after=told.append)
    assert told == [path.stem for path in paths]
    write_definitions(tmp_path / "b", model=tiny, tokens=(1, 3))
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*.*"))
    assert len(files) == len(FORMS) * (1 + 1 + 2)
    for path in files:
        assert (tmp_path / "a" / path).read_bytes() == (tmp_path / "b" / path).read_bytes()
    (blob,) = [
        path
        for path in (tmp_path / "a" / "blob").rglob("finalize_moe_output_k2_h256/*")
        if safe_open(path, "pt").get_tensor("expert_weights").shape[0] == 3
    ]
    with safe_open(blob, "pt") as opened:
        rows = opened.get_tensor("gemm2_permuted")
        index = opened.get_tensor("expanded_idx_to_permuted_idx")
        assert "/moe/" in opened.metadata()["moetail_case"]
    assert bool(rows.isnan().any())  # padding that nobody may read
    assert not bool(rows[index[index >= 0].long()].isnan().any())


def test_flashinfer_bench_takes_them(tmp_path: Path, tiny: str) -> None:
    bench = pytest.importorskip("flashinfer_bench")
    from flashinfer_bench.bench.evaluators.utils import allocate_outputs, normalize_result
    from flashinfer_bench.bench.utils import gen_inputs, load_safetensors
    from flashinfer_bench.compile import BuilderRegistry

    write_definitions(tmp_path, model=tiny, tokens=(1, 5))
    traces = bench.TraceSet.from_path(str(tmp_path))
    assert len(traces.definitions) == len(FORMS)
    for form in FORMS:
        made = traces.definitions[form.name(2, 256)]
        run = BuilderRegistry.get_instance().build_reference(made)
        loads = [trace.workload for trace in traces.workloads[made.name]]
        assert [load.axes.get("num_tokens") for load in loads] == [1, 5]
        for load in loads:
            tensors = load_safetensors(made, load, tmp_path)
            inputs = gen_inputs(made, load, "cpu", tensors)
            result = normalize_result(made, run(*inputs), "cpu")
            empty = allocate_outputs(made, inputs, "cpu")
            assert [(t.shape, t.dtype) for t in result] == [(t.shape, t.dtype) for t in empty]
            assert made.get_axes_values_from_inputs(inputs) == load.axes


def test_the_command(tmp_path: Path, tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["definitions", "--out", str(tmp_path / "deep" / "set"), "--model", tiny])
    assert ended.value.code == 0
    listed = capsys.readouterr().out
    assert all(form.name(2, 256) in listed for form in FORMS)
    assert len(list((tmp_path / "deep" / "set" / "definitions").rglob("*.json"))) == len(FORMS)
    for wrong in ("gpt-oss-120b", "gpt-9"):
        with pytest.raises(SystemExit) as ended:
            main(["definitions", "--out", str(tmp_path), "--model", wrong])
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert wrong in said
        assert "deepseek-v3" in said
    with pytest.raises(UsageError, match="gpt-9"):
        write_definitions(tmp_path, model="gpt-9")
