"""A capture never breaks the program that it looks at, whatever happens to it."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from torch import Tensor

from conformance.tests.dumps.calls import case
from moetail.conformance.dumps import Mapped, capture, files, judge_files, load_dump
from moetail.reference import Reference

GIVEN = case("boundary").replace(tokens=40).arguments()
RESULT = Reference().beam_norm_residual_norm(**GIVEN)
ERROR = ValueError("no")
_SAID = "nothing is captured where torch compiles or traces"


def returns(**given: Any) -> Any:
    return RESULT


def raises(**given: Any) -> Any:
    raise ERROR


def target(function: Callable[..., Any]) -> Any:
    return types.SimpleNamespace(beam_norm_residual_norm=function)


@contextmanager
def one_warning(said: str) -> Iterator[None]:
    """What is in it warns of this once, and of nothing else."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    told = [str(one.message) for one in caught]
    assert len(told) == 1, told
    assert said in told[0]
    if said != _SAID:  # which the compiler calls
        assert caught[0].filename == __file__


def look_at_calls(folder: Path, break_it: Callable[[], Any] = lambda: None, **given: Any) -> None:
    """Three captured calls each of what returns and of what raises, which do what they always do.

    Args:
        break_it: is called once the capture stands.
        given: what is called, where it is not a legal call.
    """
    given = given or GIVEN
    good, bad = target(returns), target(raises)
    with capture(folder, good, bad, calls=range(9)):
        break_it()
        for _ in range(3):
            assert good.beam_norm_residual_norm(**given) is RESULT
            with pytest.raises(ValueError, match="no") as caught:
                bad.beam_norm_residual_norm(**given)
            assert caught.value is ERROR
            assert caught.value.__context__ is None


def _full(tensors: Any, part: Path, metadata: Any) -> None:
    part.write_bytes(b"half")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(part))


def _full_too(tensors: Any, part: Path, metadata: Any) -> None:
    raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize(
    ("owner", "name", "function"),
    [
        (files, "save_file", _full),
        (files, "save_file", _full_too),
        (os, "fsync", lambda file: _full({}, Path("/dev/null"), {})),
        (Path, "replace", lambda path, to: _full({}, path, {})),
    ],
)
def test_a_full_disk_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, function: Any
) -> None:
    monkeypatch.setattr(owner, name, function)
    with one_warning("No space left on device"):
        look_at_calls(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_indeed(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        with one_warning("No space left on device"):
            look_at_calls(tmp_path)
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with one_warning("File too large"):
            look_at_calls(
                tmp_path, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, most))
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("when", ["before", "then"])
def test_a_folder_that_cannot_be_written(tmp_path: Path, when: str) -> None:
    tmp_path.chmod(0o555)
    if os.geteuid() == 0:  # who may write it all the same
        os.seteuid(65534)
    try:
        with one_warning("Permission denied"):
            look_at_calls(tmp_path / "deep" if when == "before" else tmp_path)
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_none_or_vanishes(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with one_warning("nothing is captured"):
        look_at_calls(tmp_path / "file")
    folder = tmp_path / "folder"
    with one_warning("No such file or directory"):
        look_at_calls(folder, folder.rmdir)
    assert not folder.exists()


class Odd:
    """An object that does not answer."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


UNSAVED: dict[str, Any] = {
    "set": {1},
    "lock": threading.Lock(),
    "silent": Odd(),
    "nested": [[1.0]],
    "endless": ENDLESS,
    "integer": 10**400,
    "surrogate": "\ud800",
    "sparse": torch.zeros(2).to_sparse(),
    "spread": torch.empty(1 << 26, dtype=torch.uint8)[:: 1 << 25],
}


@pytest.mark.parametrize("name", UNSAVED)
def test_an_argument_that_cannot_be_saved_is_one_warning(tmp_path: Path, name: str) -> None:
    with one_warning("call 0 of beam_norm_residual_norm is not saved: "):
        look_at_calls(tmp_path, **{**GIVEN, "scales": UNSAVED[name]})
    assert list(tmp_path.iterdir()) == []


def test_a_call_of_another_signature_is_one_warning(tmp_path: Path) -> None:
    with one_warning("not called as beam_norm_residual_norm(x: "):
        look_at_calls(tmp_path, y=1)
    assert list(tmp_path.iterdir()) == []


def test_a_result_that_cannot_be_saved_is_one_warning(tmp_path: Path) -> None:
    made = object()
    owner = target(lambda **given: made)
    with one_warning("result is a object, which cannot be saved"), capture(tmp_path, owner):
        assert owner.beam_norm_residual_norm(**GIVEN) is made
    assert list(tmp_path.iterdir()) == []


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not said")


def test_exceptions_are_passed_on_whatever_they_say(tmp_path: Path) -> None:
    for error in (Silent(), ValueError("x" * 10_000_000), ValueError("\x1b[31m\ud800")):

        def fails(error: Exception = error, **given: Any) -> Any:
            raise error

        owner = target(fails)
        with (
            warnings.catch_warnings(record=True),
            capture(tmp_path, owner),
            pytest.raises(type(error)) as caught,
        ):
            owner.beam_norm_residual_norm(**GIVEN)
        assert caught.value is error
    long, odd = sorted(tmp_path.iterdir(), key=lambda path: -path.stat().st_size)
    assert load_dump(long).raised.startswith("ValueError: xxx")
    assert load_dump(odd).raised == r"ValueError: \x1b[31m\ud800"
    assert judge_files([long]).violations[0].rule == "TAIL"


def test_a_mapping_that_fails_is_one_warning(tmp_path: Path) -> None:
    def norm(x: Tensor) -> Tensor:
        return x

    owner = types.SimpleNamespace(norm=norm)
    for wrong in ({"output": lambda given: 1 / 0}, {"output": "x"}):
        arguments = {"expert_outputs": "x", "expert_weights": "x", "output": "x", **wrong}
        mapped = Mapped(
            owner, "norm", "beam_moe_finalize", arguments, result=lambda value, given: given["y"]
        )
        x = torch.zeros(2, 2)
        with one_warning("is not saved: "), capture(tmp_path, mapped=[mapped], calls=range(9)):
            assert owner.norm(x) is owner.norm(x) is x
    assert list(tmp_path.iterdir()) == []


def test_a_warning_that_is_an_error_is_none_of_the_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        look_at_calls(tmp_path, y=1)
    assert capsys.readouterr().err.count("is not saved") == 1


def test_threads_count_their_calls_apart(tmp_path: Path) -> None:
    owner = target(returns)

    def run() -> None:
        for _ in range(5):
            owner.beam_norm_residual_norm(**GIVEN)

    with capture(tmp_path, owner, calls=range(99)) as made:
        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(load_dump(path).call for path in made.files) == list(range(20))
    assert len(list(tmp_path.iterdir())) == 20


def test_a_second_capture_into_a_folder_keeps_the_first(tmp_path: Path) -> None:
    owner, made = target(returns), []
    for _ in range(3):
        with capture(tmp_path, owner) as captured:
            owner.beam_norm_residual_norm(**GIVEN)
        made += captured.files
    assert sorted(made) == sorted(tmp_path.iterdir())
    assert len(made) == 3


# --- compilers ------------------------------------------------------------------------------------


def step(owner: Any, x: Tensor) -> Tensor:
    hidden: Tensor = owner.beam_norm_residual_norm(**{**GIVEN, "x": x})[0]
    return hidden * 2


def adds(**given: Any) -> Any:
    return given["x"] + given["residual"], None


def test_a_compiled_graph_stays_whole_and_is_not_captured(tmp_path: Path) -> None:
    owner, x = target(adds), GIVEN["x"]
    due = step(owner, x)
    with capture(tmp_path, owner, calls=range(9)) as made:
        compiled = torch.compile(lambda x: step(owner, x), backend="eager", fullgraph=True)
        with one_warning(_SAID):
            assert torch.equal(compiled(x), due)
            assert torch.equal(compiled(x), due)
            assert torch.equal(compiled(x[:1]), step(target(adds), x[:1]))  # compiles again
        assert made.files == []
        step(owner, x)
    assert len(made.files) == 1


def test_traced_graphs_are_what_they_are_without_a_capture(tmp_path: Path) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    owner, x = target(adds), GIVEN["x"]

    def traced(x: Tensor) -> Tensor:
        return step(owner, x)

    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return traced(x)

    ways: list[Callable[[], str]] = [
        lambda: torch.fx.symbolic_trace(traced).code,
        lambda: make_fx(traced)(x).code,
        lambda: str(torch.export.export(Module(), (x,), strict=False).graph),
        lambda: str(torch.jit.trace(traced, x, check_trace=False).graph),
    ]
    for number, way in enumerate(ways):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            due = way()
        folder = tmp_path / str(number)
        with warnings.catch_warnings(record=True) as caught, capture(folder, owner):
            warnings.simplefilter("always")
            assert way() == due
        assert sum(_SAID in str(one.message) for one in caught) == 1
        assert list(folder.iterdir()) == []
