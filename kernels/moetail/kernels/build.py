"""Compile the CUDA sources, cache the library, load it.

A library is built once for its sources, flags and GPU architecture and kept in the cache directory:
``MOETAIL_CACHE_DIR``, or ``~/.cache/moetail``. As a command it needs no GPU:

    python -m moetail.kernels.build [sm80 sm90 sm100 sm120] [--out DIR]

compiles for each architecture and writes DIR/registers-ARCH.txt: per kernel the registers a thread,
bytes spilled, stack and shared memory. It fails where a kernel spills more than it is known to.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["ARCHITECTURES", "BuildError", "build", "library", "register_report"]

# Compute capability by the name of the architecture.
ARCHITECTURES = {"sm80": "8.0", "sm90": "9.0", "sm100": "10.0", "sm120": "12.0"}

CSRC = Path(__file__).parent / "csrc"
SOURCES = ("finalize.cu", "tail.cu", "gather.cu", "allreduce.cu", "direct.cu")
HEADERS = ("arguments.h", "binding.h", "stages.cuh", "exchange.h", "exchange.cuh")
# No fast math: subnormals count, and division and square root are IEEE's.
FLAGS = ("-Xptxas=-v",)
# Bytes a thread may spill: a few registers are the price of one block an SM more.
MAX_SPILL = 48

_environment_lock = threading.Lock()


class BuildError(RuntimeError):
    """The kernels cannot be built here. The message says what to install, or what nvcc said."""


def library(capability: tuple[int, int]) -> Any:
    """The loaded kernels for a GPU of that compute capability, built at the first use.

    Raises:
        BuildError: a package or the CUDA compiler is missing, or the compiler fails.
    """
    return _library(f"{capability[0]}.{capability[1]}")


@functools.cache
def _library(capability: str) -> Any:
    ffi = _tvm_ffi()
    return ffi.load_module(str(build(capability)))


def build(capability: str, directory: Path | None = None) -> Path:
    """Compile for a compute capability such as "9.0"; returns the shared library's path.

    In ``directory`` it compiles anew. Without one the library comes from the cache, where it needs
    no compiler if it is there.

    Raises:
        BuildError: as :func:`library`.
    """
    return _compile(capability, directory)[0]


def _compile(capability: str, directory: Path | None) -> tuple[Path, str]:
    """The library and what the compiler printed, which is nothing if the library was there."""
    ffi = _tvm_ffi()
    if directory is None:
        directory = _cache_directory() / _key(capability, ffi.__version__)
        built = directory / "moetail.so"
        if (directory / "complete").exists() and built.exists():
            return built, ""
    elif directory.exists():
        shutil.rmtree(directory)
    home = _cuda_home()
    directory.mkdir(parents=True, exist_ok=True)
    variables = {
        "TVM_FFI_CUDA_ARCH_LIST": capability,
        "TVM_FFI_CPP_EXTENSION_LOG_BUILD": "stdout",
        "CUDA_HOME": str(home),
        "PATH": os.pathsep.join((*_tool_directories(), os.environ.get("PATH", ""))),
    }
    with _environment(variables), _logged("tvm_ffi.cpp.extension") as lines:
        ffi.cpp.extension._find_cuda_home.cache_clear()
        try:
            path = ffi.cpp.build(
                "moetail",
                sources=[str(CSRC / name) for name in SOURCES],
                extra_cuda_cflags=list(FLAGS),
                extra_ldflags=[f"-L{home / name}" for name in ("lib64", "lib")],
                build_directory=str(directory),
                backend="cuda",
            )
        except RuntimeError as error:
            raise BuildError(
                f"the kernels do not compile for compute capability {capability} "
                f"with {home / 'bin' / 'nvcc'}:\n{error}"
            ) from error
    (directory / "complete").touch()
    return Path(path), "\n".join(lines)


def _tvm_ffi() -> Any:
    try:
        import tvm_ffi
        import tvm_ffi.cpp
    except ImportError as error:
        raise BuildError(
            f"the CUDA kernels need the package apache-tvm-ffi ({error}): "
            "pip install 'moetail[kernels]'"
        ) from error
    return tvm_ffi


def _cache_directory() -> Path:
    return Path(os.environ.get("MOETAIL_CACHE_DIR") or "~/.cache/moetail").expanduser()


def _key(capability: str, ffi_version: str) -> str:
    digest = hashlib.sha256()
    for part in (capability, ffi_version, *FLAGS):
        digest.update(part.encode() + b"\0")
    for name in (*SOURCES, *HEADERS):
        digest.update((CSRC / name).read_bytes() + b"\0")
    return f"sm{capability.replace('.', '')}-{digest.hexdigest()[:16]}"


def _cuda_home() -> Path:
    """The CUDA toolkit: CUDA_HOME or CUDA_PATH, else where the nvcc on the path says it is."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        home = os.environ.get(name)
        if home and (Path(home) / "bin" / "nvcc").exists():
            return Path(home)
    nvcc = shutil.which("nvcc")
    if nvcc is None and Path("/usr/local/cuda/bin/nvcc").exists():
        nvcc = "/usr/local/cuda/bin/nvcc"
    if nvcc is None:
        raise BuildError(
            "no CUDA compiler: nvcc is neither on the path nor under CUDA_HOME. Install the CUDA "
            "toolkit 12.8 or newer, or pip install nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm "
            "nvidia-cuda-cccl nvidia-cuda-runtime and set CUDA_HOME to its nvidia/cu13 folder."
        )
    # An nvcc on the path may be a link or a script; it knows its own folder.
    answer = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True, check=False
    )
    here = re.search(r"_HERE_=(.+)", answer.stderr)
    return Path(here[1].strip()).parent if here else Path(nvcc).resolve().parents[1]


def _tool_directories() -> list[str]:
    """Where ninja may be though the path does not say so: in an environment not activated."""
    directories = [str(Path(sys.executable).parent)]
    with contextlib.suppress(ImportError):
        import ninja

        directories.append(str(ninja.BIN_DIR))
    return directories


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """tvm_ffi takes its options from the environment."""
    with _environment_lock:
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


@contextlib.contextmanager
def _logged(name: str) -> Iterator[list[str]]:
    """What a logger says meanwhile; shown nowhere."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


# --- the report of registers ----------------------------------------------------------------------


@dataclass(frozen=True)
class Usage:
    """What one kernel takes: registers a thread, and bytes."""

    kernel: str
    registers: int
    spilled: int
    stack: int
    shared: int


def register_report(output: str) -> list[Usage]:
    """From what ``ptxas -v`` prints, sorted by kernel."""
    pattern = re.compile(
        r"Compiling entry function '(?P<name>\S+)'.*?"
        r"(?P<stack>\d+) bytes stack frame, (?P<spilled>\d+) bytes spill stores.*?"
        r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
        re.DOTALL,
    )
    found = []
    for match in pattern.finditer(output):
        shared = re.search(r"(\d+) bytes smem", match["rest"])
        found.append(
            Usage(
                _readable(match["name"]),
                int(match["registers"]),
                int(match["spilled"]),
                int(match["stack"]),
                int(shared[1]) if shared else 0,
            )
        )
    return sorted(
        found,
        key=lambda usage: [
            int(part) if part.isdigit() else part for part in re.split(r"(\d+)", usage.kernel)
        ],
    )


def _readable(mangled: str) -> str:
    """tail_kernel<8, 1, true, 512, 1> from its mangled name."""
    name = re.search(r"\d+([a-z_]+_kernel)(I(?:L[ib]\d+E)+E)?", mangled)
    if name is None:
        return mangled
    values = re.findall(r"L([ib])(\d+)E", name[2] or "")
    words = [("false", "true")[int(value)] if kind == "b" else value for kind, value in values]
    return name[1] + (f"<{', '.join(words)}>" if words else "")


def main(arguments: list[str] | None = None) -> int:
    """Compile for each architecture; exit code 1 where one fails or spills."""
    parser = argparse.ArgumentParser("moetail.kernels.build", description=main.__doc__)
    parser.add_argument("arch", nargs="*", help=f"of {', '.join(ARCHITECTURES)}; all if none")
    parser.add_argument("--out", type=Path, default=Path("build/kernels"))
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.arch) - set(ARCHITECTURES))
    if unknown:
        parser.error(
            f"unknown architecture {', '.join(unknown)}: not of {', '.join(ARCHITECTURES)}"
        )
    failed = False
    for arch in options.arch or ARCHITECTURES:
        try:
            _, output = _compile(ARCHITECTURES[arch], options.out / arch)
        except BuildError as error:
            print(f"{arch}: {error}", file=sys.stderr)
            failed = True
            continue
        usages = register_report(output)
        rows = [f"{'kernel':40} {'registers':>9} {'spilled':>7} {'stack':>6} {'shared':>6}"]
        rows += [
            f"{u.kernel:40} {u.registers:9} {u.spilled:7} {u.stack:6} {u.shared:6}" for u in usages
        ]
        report = options.out / f"registers-{arch}.txt"
        report.write_text("\n".join(rows) + "\n")
        worst = max(usages, key=lambda usage: usage.spilled)
        most = max(usage.registers for usage in usages)
        print(
            f"{arch}: {len(usages)} kernels, at most {most} registers a thread and "
            f"{worst.spilled} bytes spilled ({worst.kernel}); {report}"
        )
        if worst.spilled > MAX_SPILL:
            print(f"{arch}: {worst.kernel} spills more than {MAX_SPILL} bytes", file=sys.stderr)
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
