"""``moetail init``: a template that runs at once, and that nothing is lost to."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from moetail.conformance.cli import main
from moetail.conformance.export.template import TODO, template, unfilled
from moetail.conformance.implementation import load
from moetail.spec import ContractError, MoETail
from moetail.spec.rules import FINALIZE, OPERATIONS, WORKSPACE


def moetail(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return int(ended.value.code or 0)


def module(text: str) -> ModuleType:
    made = ModuleType("filled")
    exec(compile(text, "filled", "exec"), made.__dict__)
    return made


def test_a_template_has_every_operation_with_its_signature_and_text() -> None:
    tree = ast.parse(template())
    functions = {item.name: item for item in tree.body if isinstance(item, ast.FunctionDef)}
    classes = {item.name for item in tree.body if isinstance(item, ast.ClassDef)}
    names = [item.name for item in OPERATIONS]
    assert [*functions] == [TODO + name for name in names if name != WORKSPACE]
    assert classes == {TODO + WORKSPACE}
    for name, function in functions.items():
        contract = ast.parse(f"class _:\n{_source(name.removeprefix(TODO))}").body[0]
        assert isinstance(contract, ast.ClassDef)
        (wanted,) = contract.body
        assert isinstance(wanted, ast.FunctionDef)
        wanted.args.args = wanted.args.args[1:]
        assert ast.unparse(function.args) == ast.unparse(wanted.args)
        assert function.returns is not None
        assert wanted.returns is not None
        assert ast.unparse(function.returns) == ast.unparse(wanted.returns)
        assert "Rules: " in (ast.get_docstring(function) or "")
    assert ":class:" not in template()


def _source(name: str) -> str:
    import inspect

    return inspect.getsource(getattr(MoETail, name))


def test_an_unfilled_operation_is_not_provided_and_a_filled_one_is(tmp_path: Path) -> None:
    path = tmp_path / "kernel.py"
    assert moetail("init", str(path)) == 0
    assert load(str(path)).provided == ()
    assert unfilled(load(str(path)).target) == [TODO + item.name for item in OPERATIONS]
    filled = tmp_path / "filled.py"
    filled.write_text(
        path.read_text(encoding="utf-8").replace(f"def {TODO}{FINALIZE}(", f"def {FINALIZE}("),
        encoding="utf-8",
    )
    assert load(str(filled)).provided == (FINALIZE,)


def test_the_checks_of_a_template_refuse_and_the_rest_is_to_be_written() -> None:
    filled = module(re.sub(rf"\b{TODO}(?=\w+\()", "", template()))
    rows, weights = torch.zeros(2, 1, 256).bfloat16(), torch.ones(2, 1)
    destination = torch.zeros(2, 256).bfloat16()
    with pytest.raises(ContractError, match="DOMAIN-1"):
        filled.beam_moe_finalize(rows, weights.double(), destination)
    with pytest.raises(NotImplementedError):
        filled.beam_moe_finalize(rows, weights, destination)
    boundary: dict[str, Any] = {"post_weight": None, "post_eps": None, "next_weight": None}
    with pytest.raises(NotImplementedError):
        filled.beam_norm_residual_norm(
            destination, destination, **boundary, next_eps=None, scales=None
        )
    for item in OPERATIONS[2:]:
        if item.name == WORKSPACE:
            continue
        function = getattr(filled, item.name)
        arguments = [object()] * function.__code__.co_argcount
        with pytest.raises((ContractError, AttributeError)):
            function(*arguments)


def test_init_writes_what_was_asked_for_and_says_what_is_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my kernel.py"
    assert moetail("init", str(path), "--op", "finalize", "--op", "workspace") == 0
    said = capsys.readouterr().out
    assert f"2 to fill: {TODO}{FINALIZE}, {TODO}{WORKSPACE}" in said
    assert f"moetail check '{path}'" in said
    text = path.read_text(encoding="utf-8")
    assert re.findall(rf"^(?:def|class) {TODO}(\w+)", text, re.MULTILINE) == [FINALIZE, WORKSPACE]
    assert "UnfinalizedMoEOutput" not in text
    module(text)


def test_a_fresh_template_is_checked_with_3_and_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kernel.py"
    assert moetail("init", str(path), "--op", "finalize") == 0
    capsys.readouterr()
    assert moetail("check", str(path)) == 3
    said = " ".join(capsys.readouterr().out.split())
    assert f"To be filled: {TODO}{FINALIZE}." in said
    assert "NOTHING WAS JUDGED" in said


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("there.py", "is there already"),
        ("dangling.py", "is there already"),
        ("folder.py", "is there already"),
        ("nowhere/kernel.py", "No such file"),
        ("kernel.txt", "ends in .py"),
        ("kernel", "ends in .py"),
    ],
)
def test_init_refuses_and_changes_nothing(
    tmp_path: Path, name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there.py").write_text("mine", encoding="utf-8")
    (tmp_path / "dangling.py").symlink_to(tmp_path / "target.py")
    (tmp_path / "folder.py").mkdir()
    before = sorted(path.name for path in tmp_path.iterdir())
    assert moetail("init", str(tmp_path / name)) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("moetail: FILE: ")
    assert said in printed.err
    assert "; allowed: " in printed.err
    assert (tmp_path / "there.py").read_text(encoding="utf-8") == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_write_that_fails_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Path.open

    class Full:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, text: str) -> None:
            self.file.write(text[:10])
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", lambda self, *a, **k: Full(real(self, *a, **k)))
    assert moetail("init", str(tmp_path / "kernel.py")) == 2
    assert "No space left" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_operation_is_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert moetail("init", str(tmp_path / "kernel.py"), "--op", "finalise") == 2
    assert "--op: " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_odd_names_do_not_break_the_text() -> None:
    for name in ('"""x.py', "a\\N.py", "{todo}.py"):
        ast.parse(template(path=name))
