"""What a terminal shows, whatever the names, the width, the disk and the installation are like."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from conformance.tests.cli.test_cli import BROKEN, moetail, run

RAISING = (
    BROKEN
    + """

def beam_norm_residual_norm(*args, **kwargs):
    raise RuntimeError("no [red]such[/] thing \\x1b[31m \\udcff")
"""
)


def test_a_narrow_terminal_breaks_no_word_and_shows_a_traceback_once(tmp_path: Path) -> None:
    folder = tmp_path / "a [red]b[bold]"
    folder.mkdir()
    (folder / "kernel.py").write_text(RAISING, encoding="utf-8")
    words = ("check", "kernel.py", "--rule", "ROUND,RUN-1,RUN-6")
    done = moetail(folder, *words, "--report", "out", "--summary", "summary.md", COLUMNS="80")
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    for line in lines:  # what is longer is one word, or copied from a traceback
        assert (
            len(line) <= 80
            or line.startswith("  | ")
            or str(tmp_path) in line
            or ("/" in line and len(line.split()) <= 2)
        ), line
    # Each heading stands whole; what is not provided has neither column nor row.
    heading = next(line for line in lines if line.startswith("\u2503 rule"))
    assert heading.replace("\u2503", " ").split() == ["rule", "finalize", "boundary"]
    assert not any(line.startswith("\u2502 ROUND-7") for line in lines)
    assert done.stdout.count("Traceback (most recent call last)") == 1
    assert "raised:    where RUN-1 by boundary, above, did" in done.stdout
    text = " ".join(done.stdout.split())
    # The sentence of the deviation, and why a rule was not judged.
    assert "scale-before-rounding: Multiplies the FP32 sum by the scale" in text
    assert "Not judged: RUN-6 of finalize, boundary (2 cases): needs a GPU" in text
    # Nothing of it is markup, or acts on a terminal.
    assert "a [red]b[bold]" in text
    assert "no [red]such[/] thing \\x1b[31m \\udcff" in text
    assert "\x1b" not in done.stdout
    for name in ("out/report.html", "summary.md"):
        written = (folder / name).read_text(encoding="utf-8")
        assert "\\x1b" in written.replace("\\\\", "\\")
        assert "\x1b" not in written
    ElementTree.parse(folder / "out/junit.xml")
    # The command of several lines is one to a shell.
    start = lines.index("  repeat:")
    shown = [line.strip() for line in lines[start + 1 : start + 4]]
    assert shown[0].startswith("moetail check ")
    assert shown[0].endswith(" \\")


def test_all_operations_fit_into_80_columns() -> None:
    from rich.console import Console

    from moetail.conformance.implementation import load
    from moetail.conformance.report.terminal import matrix_tables
    from moetail.conformance.run.plan import Plan
    from moetail.conformance.run.results import Results
    from moetail.spec.rules import OPERATIONS

    results = Results.of(load("reference"), Plan())
    for width in (40, 80, 100, 200):
        console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        for part in matrix_tables(results, width):
            console.print(part)
        text = console.export_text()
        assert "\u2026" not in text
        assert max(map(len, text.splitlines())) <= width
        shown = set(text.replace("\u2503", " ").split())
        assert {word for item in OPERATIONS for word in item.short.split()} <= shown


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of a process's own")
def test_a_full_disk_costs_the_report_and_not_the_verdict(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(BROKEN, encoding="utf-8")
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (9, 9))\n"
        "from moetail.conformance.cli import main; main()"
    )
    words = ("check", "kernel.py", "--rule", "ROUND-2", "--report", "out", "--summary", "s.md")
    done = run(tmp_path, "-B", "-c", code, *words)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "VIOLATES ROUND-2: " in done.stdout
    said = [line for line in done.stderr.splitlines() if "not written" in line]
    assert len(said) == 5
    assert all("File too large" in line for line in said)
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "out").iterdir())

    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "moetail.conformance.cli", *words[:4]],
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1, done.stderr
    assert done.stderr == "moetail: standard output: No space left on device\n"


EXTRA = "('jinja2', 'msgspec', 'numpy', 'rich', 'safetensors', 'typer')"


@pytest.mark.parametrize("command", [["check"], ["judge", "x"], ["--version"], []])
def test_torch_alone_says_what_to_install(tmp_path: Path, command: list[str]) -> None:
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({EXTRA}))\n"
        "from moetail.conformance.cli import main; main()"
    )
    done = run(tmp_path, "-c", code, *command)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.endswith("pip install 'moetail[conformance]'")


def test_every_module_says_what_to_install(tmp_path: Path) -> None:
    code = f"""
import importlib, pathlib, sys
sys.modules.update(dict.fromkeys({EXTRA}))
import moetail.conformance
root = pathlib.Path(moetail.conformance.__file__).parent
for path in sorted(root.rglob("*.py")):
    name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    if name.startswith(("__", "adapters.", "plugin", "cli.")):
        continue
    try:
        importlib.import_module(f"moetail.conformance.{{name}}")
    except ImportError as error:
        if "pip install 'moetail[conformance]'" not in str(error):
            print(name, error)
"""
    done = run(tmp_path, "-c", code)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    from moetail.conformance.cli import main

    asked = {"-h": "definitions", "check -h": "--rank-timeout", "--version": "moetail "}
    for words, said in asked.items():
        with pytest.raises(SystemExit) as ended:
            main(words.split())
        assert ended.value.code == 0
        assert said in capsys.readouterr().out


def test_a_file_imports_what_lies_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "kernels of mine"
    folder.mkdir()
    (folder / "my_helper.py").write_text(BROKEN, encoding="utf-8")
    (folder / "torch.py").write_text("raise RuntimeError('hidden')", encoding="utf-8")
    text = "import torch\nfrom my_helper import beam_moe_finalize\nassert torch.bfloat16\n"
    (folder / "kernel.py").write_text(text, encoding="utf-8")
    done = moetail(tmp_path, "check", "kernels of mine/kernel.py", "--rule", "ROUND-2")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "VIOLATES ROUND-2: " in done.stdout


def test_a_file_that_exits_is_usage(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text("import sys\nsys.exit(0)\n", encoding="utf-8")
    done = moetail(tmp_path, "check", "kernel.py")
    assert done.returncode == 2
    assert "SystemExit" in done.stderr
