"""The build: what it says where it cannot, its cache, and its report of registers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moetail.kernels import build

PTXAS = """\
ptxas info    : Compiling entry function '_Z11tail_kernelILi8ELi1ELb1ELi512ELi1EEvx' for 'sm_90'
ptxas info    : Function properties for _Z11tail_kernelILi8ELi1ELb1ELi512ELi1EEvx
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 87 registers, used 1 barriers, 16 bytes stack frame, 272 bytes smem
ptxas info    : Compile time = 41.0 ms
ptxas info    : Compiling entry function '_ZN7moetail2_x19finalize_any_kernelENS_1PEll' for 'sm_90'
ptxas info    : Function properties for _ZN7moetail2_x19finalize_any_kernelENS_1PEll
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 28 registers, used 0 barriers
"""


def has_compiler() -> bool:
    try:
        build._cuda_home()
    except build.BuildError:
        return False
    return True


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("MOETAIL_CACHE_DIR", str(tmp_path / "cache"))
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: path.name != "nvcc" and exists(path))


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_it_says_what_to_install() -> None:
    pytest.importorskip("tvm_ffi")
    with pytest.raises(build.BuildError, match="pip install nvidia-cuda-nvcc"):
        build.build("9.0")


@pytest.mark.usefixtures("no_compiler")
def test_a_cached_library_needs_no_compiler() -> None:
    ffi = pytest.importorskip("tvm_ffi")
    directory = build._cache_directory() / build._key("9.0", ffi.__version__)
    directory.mkdir(parents=True)
    (directory / "moetail.so").touch()
    with pytest.raises(build.BuildError):
        build.build("9.0")  # a build that was cut off is not taken
    (directory / "complete").touch()
    assert build.build("9.0") == directory / "moetail.so"


def test_the_key_follows_sources_flags_and_architecture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = {build._key("9.0", "1"), build._key("8.0", "1"), build._key("9.0", "2")}
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-lineinfo"))
    keys.add(build._key("9.0", "1"))
    for name in (*build.SOURCES, *build.HEADERS):
        (tmp_path / name).write_bytes((build.CSRC / name).read_bytes())
    monkeypatch.setattr(build, "CSRC", tmp_path)
    (tmp_path / "stages.cuh").write_text("// changed\n")
    keys.add(build._key("9.0", "1"))
    assert len(keys) == 5


def test_every_source_is_named() -> None:
    assert {*build.SOURCES, *build.HEADERS} == {path.name for path in build.CSRC.iterdir()}


@pytest.mark.skipif(not has_compiler(), reason="needs nvcc")
def test_a_failing_build_shows_the_compilers_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("tvm_ffi")
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "finalize.cu").write_text("int wrong = no_such_name;\n")
    monkeypatch.setattr(build, "CSRC", sources)
    monkeypatch.setattr(build, "SOURCES", ("finalize.cu",))
    with pytest.raises(build.BuildError, match='identifier "no_such_name" is undefined'):
        build.build("9.0", tmp_path / "out")


@pytest.mark.skipif(not has_compiler(), reason="needs nvcc")
def test_compiles_without_a_gpu_and_reports_registers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Two sources, for time's sake: the session ``build`` compiles all, for every architecture."""
    pytest.importorskip("tvm_ffi")
    monkeypatch.setattr(build, "SOURCES", ("finalize.cu", "tail.cu"))
    before = dict(os.environ)
    assert build.main(["sm90", "--out", str(tmp_path)]) == 0
    assert dict(os.environ) == before
    assert (tmp_path / "sm90" / "moetail.so").exists()
    report = (tmp_path / "registers-sm90.txt").read_text()
    assert "finalize_kernel<8, 1>" in report
    assert "tail_kernel<8, 1, true, 512, 1, false>" in report
    assert "sm90" in capsys.readouterr().out


def test_the_command_is_not_loaded_twice() -> None:
    """As it is where the package imports it; Python warns of that."""
    words = [sys.executable, "-W", "error::RuntimeWarning", "-m", "moetail.kernels.build", "--help"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_register_report() -> None:
    assert build.register_report(PTXAS) == [
        build.Usage("finalize_any_kernel", 28, 0, 0, 0),
        build.Usage("tail_kernel<8, 1, true, 512, 1>", 87, 8, 16, 272),
    ]


def test_unknown_architecture_is_a_usage_error(capsys: Any) -> None:
    with pytest.raises(SystemExit) as error:
        build.main(["sm70"])
    assert error.value.code == 2
    assert "sm70" in capsys.readouterr().err
