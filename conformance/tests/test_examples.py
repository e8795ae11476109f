"""The examples of the documentation: they conform, and they are what the pages say."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moetail.spec import MoETail
from moetail.spec.rules import BOUNDARY, FINALIZE

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def run(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python in a folder of its own, so that nothing is left among the examples."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **variables},
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(
    ("file", "name"), [("triton_finalize.py", FINALIZE), ("cuda_boundary.py", BOUNDARY)]
)
def test_an_example_has_the_contracts_signature(file: str, name: str) -> None:
    tree = ast.parse((EXAMPLES / file).read_text(encoding="utf-8"))
    (function,) = (
        item for item in tree.body if isinstance(item, ast.FunctionDef) and item.name == name
    )
    wanted = inspect.signature(getattr(MoETail, name))
    names = [argument.arg for argument in function.args.args]
    assert names == list(wanted.parameters)[1:]
    defaults = [ast.literal_eval(item) for item in function.args.defaults]
    assert defaults == [
        item.default for item in wanted.parameters.values() if item.default is not item.empty
    ]


def test_the_triton_example_conforms(tmp_path: Path) -> None:
    """On a GPU where there is one, else in Triton's interpreter."""
    pytest.importorskip("triton")
    gpu = torch.cuda.is_available()
    words = ("-m", "moetail.conformance.cli", "check", str(EXAMPLES / "triton_finalize.py"))
    words += ("--device", "cuda") if gpu else ("--rule", "ROUND,LIVE,ROUTE,DOMAIN-1,RUN-3,TAIL")
    done = run(tmp_path, *words, **({} if gpu else {"TRITON_INTERPRET": "1"}))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "CONFORMS" in done.stdout


def test_the_cuda_example_compiles_and_conforms_where_there_is_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("tvm_ffi")
    from moetail.kernels import build

    try:
        home = build._cuda_home()
    except build.BuildError as error:
        pytest.skip(str(error))
    variables = {
        "CUDA_HOME": str(home),
        "PATH": os.pathsep.join((*build._tool_directories(), os.environ["PATH"])),
    }
    if torch.cuda.is_available():
        words = ("-m", "moetail.conformance.cli", "check", str(EXAMPLES / "cuda_boundary.py"))
        done = run(tmp_path, *words, "--device", "cuda", **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return
    code = (
        "import sys, tvm_ffi, cuda_boundary\n"
        "print(tvm_ffi.load_module(cuda_boundary.build(sys.argv[1])).boundary)"
    )
    variables |= {"TVM_FFI_CUDA_ARCH_LIST": "9.0", "PYTHONPATH": str(EXAMPLES)}
    done = run(tmp_path, "-c", code, str(tmp_path / "build"), **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Function" in done.stdout
