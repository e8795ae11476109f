"""Sessions for the checks of every day, and for kernels on a GPU of each architecture.

``nox`` alone runs what needs no GPU. The other sessions are ``nox -s "conformance(sm90)"`` and
``nox -s "bench(sm90)"``: on a machine without that GPU they say so and skip, or fail with
``-- --require-gpu``. Each session makes an environment of its own, unless ``--no-venv`` says that
the one at hand will do.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["lint", "types", "tests", "check", "mutants", "build"]

PACKAGES = [f"{root}/moetail" for root in ("spec", "reference", "kernels", "conformance")]
GROUPS = nox.project.load_toml("pyproject.toml")

# Compute capability by the name of the architecture.
ARCHITECTURES = {"sm80": "8.0", "sm90": "9.0", "sm100": "10.0", "sm120": "12.0"}

# A CUDA compiler without a CUDA installation: nvcc, its front end, its back end, and the headers
# that kernels include. The constraints pin the release.
COMPILER = [
    "nvidia-cuda-nvcc",
    "nvidia-cuda-crt",
    "nvidia-nvvm",
    "nvidia-cuda-cccl",
    "nvidia-cuda-runtime",
]


def install(session: nox.Session, *, project: bool = True, groups: tuple[str, ...] = ()) -> None:
    """The project in editable form and dependency groups.

    With ``--no-venv`` nothing: the environment that nox itself runs in then has them all, so that
    torch is installed once instead of once a session.
    """
    if session.venv_backend == "none":
        os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        return
    wanted = [item for group in groups for item in nox.project.dependency_groups(GROUPS, group)]
    if project:
        wanted += ["-e", ".[conformance,kernels]"]
    session.install("-c", "constraints.txt", *wanted)


@nox.session
def lint(session: nox.Session) -> None:
    """Style and format, and the picture of the packages."""
    install(session, project=False, groups=("lint",))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("python", "-m", "conformance.tests.imports", "--check")


@nox.session
def types(session: nox.Session) -> None:
    """Strict types in the four packages."""
    install(session, groups=("types",))
    session.run("mypy", *PACKAGES)


@nox.session
def tests(session: nox.Session) -> None:
    """Unit tests of the four packages; arguments go to pytest."""
    install(session, groups=("test",))
    session.run(
        "python", "-m", "pytest", *(session.posargs or ["-q", "-n", "auto", "--dist", "loadfile"])
    )


@nox.session
def check(session: nox.Session) -> None:
    """The reference against the suite; arguments replace ``--profile quick``."""
    install(session)
    arguments = session.posargs or ["--profile", "quick"]
    session.run("moetail", "check", "reference", "--ranks", "1,2,3,4,8", *arguments)


@nox.session
def mutants(session: nox.Session) -> None:
    """The suite against implementations that each break one rule, and legal ones."""
    install(session)
    session.run("moetail", "mutants", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation, with every link checked; arguments replace ``build --strict``."""
    install(session, groups=("docs",))
    # The theme's notice about another generator would be a warning to no purpose.
    quiet = {"NO_MKDOCS_2_WARNING": "1"}
    session.run("python", "-m", "mkdocs", *(session.posargs or ["build", "--strict"]), env=quiet)


@nox.session
def build(session: nox.Session) -> None:
    """Compile the kernels for every architecture; no GPU needed."""
    install(session)
    session.run(
        "python",
        "-m",
        "moetail.kernels.build",
        *(session.posargs or ARCHITECTURES),
        env=nvcc(session),
    )


@nox.session
@nox.parametrize("arch", list(ARCHITECTURES), ids=list(ARCHITECTURES))
def conformance(session: nox.Session, arch: str) -> None:
    """The kernels against the suite on a GPU; other arguments replace ``--profile full``."""
    arguments = on_gpu(session, arch) or ["--profile", "full"]
    install(session)
    session.run(
        "moetail",
        "check",
        "kernels",
        "--device",
        "cuda",
        "--require-gpu",
        *arguments,
        env=nvcc(session),
    )


@nox.session
@nox.parametrize("arch", list(ARCHITECTURES), ids=list(ARCHITECTURES))
def bench(session: nox.Session, arch: str) -> None:
    """The kernels against their floors and peers; other arguments go to pytest."""
    arguments = on_gpu(session, arch)
    install(session, groups=("test",))
    session.run("python", "-m", "pytest", "kernels/benchmarks", *arguments, env=nvcc(session))


@nox.session
@nox.parametrize("arch", list(ARCHITECTURES), ids=list(ARCHITECTURES))
def ranks(session: nox.Session, arch: str) -> None:
    """All GPUs of a machine together: suite, lost ranks and a soak, benchmark; then virtual ranks.

    ``--parts suite,soak,bench,virtual`` takes some of them, ``--minutes N`` is how long the soak
    takes (10), ``--profile P`` the suite's (full), ``--results DIR`` where reports go
    (build/ranks).
    """
    arguments = on_gpu(session, arch)
    number = min(len(gpus()), 8)
    if number < 2:
        session.skip(f"ranks need several GPUs; here: {number}")
    parts = ("suite", "soak", "bench", "virtual")
    parser = argparse.ArgumentParser("ranks")
    parser.add_argument("--parts", default=",".join(parts))
    parser.add_argument("--minutes", default="10")
    parser.add_argument("--profile", default="full")
    parser.add_argument("--results", type=Path, default=Path("build/ranks"))
    options = parser.parse_args(arguments)
    wanted = options.parts.split(",")
    if not set(wanted) <= set(parts):
        session.error(f"--parts: {options.parts}; allowed: some of {', '.join(parts)}")
    results = options.results
    install(session, groups=("test",))
    env = nvcc(session)
    check = ("moetail", "check", "kernels", "--device", "cuda", "--require-gpu")
    check += ("--profile", options.profile)
    if "suite" in wanted:
        groups = ",".join(str(size) for size in (1, 2, 4, 8) if size <= number)
        everything = ("--op", "gather,all-reduce,workspace", "--ranks", groups)
        session.run(*check, *everything, "--report", str(results / f"real-{number}"), env=env)
    if "soak" in wanted:
        soak = {"MOETAIL_SOAK_MINUTES": options.minutes, "MOETAIL_SOAK": "100000", **env}
        tests = ("kernels/tests/test_workspace.py", "kernels/tests/test_lost_ranks.py")
        session.run("python", "-m", "pytest", "-s", *tests, env=soak)
    if "bench" in wanted:
        bench = "kernels/benchmarks/test_bench_distributed.py"
        session.run("python", "-m", "pytest", bench, "--results", str(results), env=env)
    if "virtual" in wanted:
        virtual = ("--virtual-ranks", "--op", "gather,all-reduce", "--ranks", "2,4,8")
        session.run(*check, *virtual, "--report", str(results / "virtual"), env=env)


def on_gpu(session: nox.Session, arch: str) -> list[str]:
    """The session's arguments, where the machine has that GPU; otherwise skip, or fail."""
    arguments = [item for item in session.posargs if item != "--require-gpu"]
    found = gpus()
    if ARCHITECTURES[arch] not in found:
        here = f"of compute capability {', '.join(sorted(set(found)))}" if found else "no GPU"
        message = f"{arch} needs a GPU of compute capability {ARCHITECTURES[arch]}; here: {here}"
        if "--require-gpu" in session.posargs:
            session.error(message)
        session.skip(message)
    return arguments


def gpus() -> list[str]:
    """The compute capability of each GPU of the machine."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    return answer.stdout.split() if answer.returncode == 0 else []


def nvcc(session: nox.Session) -> dict[str, str]:
    """What the environment needs for a CUDA compiler: the machine's own, or one from packages."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if shutil.which("nvcc") or (home and (Path(home) / "bin" / "nvcc").exists()):
        return {}
    # Beside the environments, since the files need names that the packages do not give them.
    target = Path(session.cache_dir) / "cuda"
    pip = ("python", "-m", "pip", "install", "-q", "-c", "constraints.txt")
    toolkit = target / "nvidia" / "cu13"
    if not (toolkit / "lib64").exists():
        session.run(*pip, "--target", str(target), *COMPILER)
        (toolkit / "lib" / "libcudart.so").symlink_to("libcudart.so.13")
        (toolkit / "lib64").symlink_to("lib")  # last: it says that the toolkit is complete
    path = os.pathsep.join((str(toolkit / "bin"), os.environ.get("PATH", "")))
    return {"CUDA_HOME": str(toolkit), "PATH": path}
