"""The command line and the plugin, as their users run them: from a folder of their own."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from moetail.spec.rules import GATHER, OPERATIONS, RULES

# Rounds once instead of twice; nothing else of the operation matters to the rule that is asked for.
BROKEN = """
import torch


def beam_moe_finalize(
    expert_outputs, expert_weights, output, routed_scale=1.0, post_weight=None, post_eps=None
):
    live = output.shape[0]
    weighted = expert_weights[:live, :, None] * expert_outputs[:live].float()
    return output.copy_(weighted.sum(1) * torch.tensor(routed_scale))
"""


ONE = "beam_moe_finalize/normal/T1-K1-H256"


def run(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment.update({"COLUMNS": "200", "PYTEST_ADDOPTS": "", **variables})
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        text=True,
        capture_output=True,
        timeout=240,
        check=False,
    )


def moetail(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run(folder, "-m", "moetail.conformance.cli", *words, **variables)


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    path = tmp_path / "kernel.py"
    path.write_text(BROKEN, encoding="utf-8")
    return path


@pytest.mark.parametrize("sent", ["SIGINT", "SIGTERM"])
def test_what_was_judged_before_a_signal_is_reported(tmp_path: Path, sent: str) -> None:
    (tmp_path / "kernel.py").write_text(
        f"""
import os
import signal

from moetail.reference import Reference

calls = 0


def beam_moe_finalize(*args, **kwargs):
    global calls
    calls += 1
    if calls == 20:
        os.kill(os.getpid(), signal.{sent})
    return Reference().beam_moe_finalize(*args, **kwargs)
""",
        encoding="utf-8",
    )
    done = moetail(tmp_path, "check", "kernel.py", "--report", "out")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "The run ended early: interrupted while " in done.stdout
    report = json.loads((tmp_path / "out/report.json").read_text(encoding="utf-8"))
    # It says which case was running, and how many were to come.
    assert re.match(r"interrupted while [A-Z]+-\d was tried on beam_moe_fin", report["stopped"])
    assert report["totals"]["planned"] > report["totals"]["trials"]
    assert report["verdict"] == "not decided"
    assert 0 < report["totals"]["trials"] <= 20
    assert report["totals"]["judged"] > 0


def test_check_names_the_rule_and_writes_its_reports(tmp_path: Path, kernel: Path) -> None:
    done = moetail(
        tmp_path, "check", "kernel.py", "--rule", "ROUND-2,ROUND-3", "--report", "out/deep"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ROUND-2 violated by beam_moe_finalize" in done.stdout
    assert "admissible: 0x" in done.stdout
    assert "VIOLATES ROUND-2: " in done.stdout

    report = json.loads((tmp_path / "out/deep/report.json").read_text(encoding="utf-8"))
    assert report["verdict"] == "violates"
    assert report["matrix"]["ROUND-2"]["beam_moe_finalize"]["status"] == "violates"
    assert report["matrix"]["ROUND-3"]["beam_moe_finalize"]["status"] == "conforms"
    assert report["matrix"]["ROUND-3"]["beam_moe_finalize"]["judged"] > 0
    assert report["matrix"]["ROUND-2"]["finalize_moe_output"]["status"] == "not provided"
    assert report["environment"]["torch"]
    (violation,) = report["violations"]
    assert violation["rule"] == "ROUND-2"
    assert violation["deviations"] == ["scale-before-rounding"]
    assert (violation["explained"], violation["wrong"] > 0) == (1.0, True)

    suite = ElementTree.parse(tmp_path / "out/deep/junit.xml").getroot()
    cases = suite.findall(".//testcase")
    failed = [case for case in cases if case.find("failure") is not None]
    assert failed
    assert len(failed) < len(cases)
    for case in failed:
        properties = {item.get("name"): item.get("value") for item in case.iter("property")}
        assert properties["rule"] == "ROUND-2"
        assert properties["operation"] == "beam_moe_finalize"

    # The command that it prints repeats it, and nothing else.
    repeat = re.search(r"repeat:\s+moetail ((?:.*\\\n)*.*)", done.stdout)
    assert repeat
    words = shlex.split(repeat[1].replace("\\\n", " "))
    again = moetail(tmp_path, *words)
    assert again.returncode == 1, again.stdout + again.stderr
    assert violation["case"] in again.stdout
    assert "1 case," in again.stdout


def test_nothing_in_the_folder_bends_check(tmp_path: Path, kernel: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "def pytest_collection_modifyitems(items):\n    items.clear()\n", encoding="utf-8"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -k nothing\n", encoding="utf-8")
    words = ("check", "kernel.py", "--rule", "ROUND-2")
    done = moetail(tmp_path, *words, PYTEST_ADDOPTS="--collect-only -k nothing")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "VIOLATES ROUND-2: " in done.stdout


ON_TWO_RANKS = ("--op", "gather", "--ranks", "2", "--rule", "OWN-1")


def test_a_rank_server_that_is_killed_is_no_violation(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(
        """
import os
import signal

from moetail.reference import BeamAllReduceWorkspace


def beam_moe_finalize_gather_norm_residual_norm(*args, **kwargs):
    os.kill(os.getppid(), signal.SIGKILL)
""",
        encoding="utf-8",
    )
    said = f"the server of the ranks died (exit code -9) during {GATHER}"
    done = moetail(tmp_path, "check", "kernel.py", *ON_TWO_RANKS, "--report", "out")
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"The run ended early: {said}." in done.stdout
    assert "NOT DECIDED" in done.stdout
    assert "violated" not in done.stdout
    report = json.loads((tmp_path / "out/report.json").read_text(encoding="utf-8"))
    assert (report["verdict"], report["stopped"]) == ("not decided", said)
    assert "<error" in (tmp_path / "out/junit.xml").read_text(encoding="utf-8")

    words = ("-m", "pytest", "-q", "--pyargs", "moetail.conformance.suite", "--impl", "kernel.py")
    done = run(tmp_path, *words, *ON_TWO_RANKS, "-p", "no:cacheprovider")
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stdout
    assert "NOT DECIDED" in done.stdout
    assert "Traceback" not in done.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of a process's own")
def test_ranks_that_do_not_start_are_no_violation(tmp_path: Path) -> None:
    code = """
import resource

from moetail.conformance.cli import main
from moetail.conformance.run.ranks import RankPool

launch = RankPool._launch


def short_of_files(pool):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        launch(pool)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


RankPool._launch = short_of_files
main()
"""
    done = run(tmp_path, "-c", code, "check", "reference", *ON_TWO_RANKS)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "The run ended early: the rank pool did not start: " in done.stdout
    assert "Too many open files" in done.stdout
    assert "violated" not in done.stdout


def test_check_ends_with_3_where_nothing_was_judged(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("", encoding="utf-8")
    done = moetail(tmp_path, "check", "empty.py")
    assert done.returncode == 3
    assert "NOTHING WAS JUDGED" in done.stdout
    assert "provides none of the operations" in done.stdout
    # An operation that is provided, but not by any trial that was asked for.
    (tmp_path / "kernel.py").write_text(BROKEN, encoding="utf-8")
    done = moetail(tmp_path, "check", "kernel.py", "--rule", "OWN-1")
    assert done.returncode == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["check", "nowhere.py"], ["nowhere.py", ".py file"]),
        (["check", "no_such_module"], ["no_such_module", "module"]),
        (["check", "--op", "finalise"], ["finalise", "beam_moe_finalize (finalize)"]),
        (["check", "--rule", "ROUND-9"], ["ROUND-9", "ROUND-7"]),
        (["check", "--profile", "fast"], ["fast", "quick, full, soak"]),
        (["check", "--ranks", "2,0"], ["'0'", ">= 1"]),
        (["check", "--ranks", "1000000000"], ["--ranks", "<= 256"]),
        (["check", "--seed", "9" * 5000], ["--seed", "<= 9223372036854775807"]),
        (["check", "--rank-timeout", "0"], ["--rank-timeout", ">= 1"]),
        (["check", "--rank-timeout", "1" * 30], ["--rank-timeout", "<= 86400"]),
        (["check", "--op", ""], ["--op: ''", "names"]),
        (["check", "--op", "finalize,"], ["--op: 'finalize,'"]),
        (["check", "--rule", ""], ["--rule: ''"]),
        (["check", "--case", ""], ["--case", "operation/source"]),
        (["check", "--case", f"{ONE}~no-such"], ["--case", "no-such", "other-dead-weights"]),
        (["check", "--case", ONE.replace("T1", "T99999999999999")], ["--case", "2^36"]),
        (["check", "\x1b[31m/no\udcff[red].py"], ["\\x1b[31m/no\\udcff[red].py"]),
        (["check", "--no-such"], ["--no-such"]),
        (["no-such"], ["no-such"]),
        (["mutants", "--workers", "0"], ["--workers"]),
        (["check", "--ranks", "two"], ["'two'", ">= 1"]),
        (["check", "--seed", "-1"], ["-1", ">= 0"]),
        (["check", "--device", "tpu"], ["tpu", "cpu, cuda"]),
        (["check", "--case", "beam_moe_finalize/no_such_source/T1-K1-H256"], ["no_such_source"]),
        (["check", "--case", "x"], ["--case"]),
        (["rules", "ROUND-9"], ["ROUND-9", "ROUND-7"]),
        (["cases", "--op", "finalise"], ["finalise"]),
    ],
)
def test_wrong_usage_ends_with_2_and_says_what_is_allowed(
    tmp_path: Path, words: list[str], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    from moetail.conformance.cli import main

    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        with pytest.raises(SystemExit) as ended:
            main(words)
    finally:
        os.chdir(before)
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("moetail: ")
    for part in said:
        assert part in printed.err
    assert "Traceback" not in printed.err + printed.out
    assert len(printed.err.splitlines()) == 1


def test_a_file_that_cannot_be_imported_is_usage(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text("import no_such_dependency\n", encoding="utf-8")
    done = moetail(tmp_path, "check", "kernel.py")
    assert done.returncode == 2
    assert "no_such_dependency" in done.stderr


def test_rules_and_cases_list_what_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from moetail.conformance.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["rules"])
    assert ended.value.code == 0
    listed = capsys.readouterr().out
    assert all(f"\n{rule.id} " in "\n" + listed for rule in RULES)
    with pytest.raises(SystemExit):
        main(["rules", "round-2"])
    shown = capsys.readouterr().out
    assert "rounded to BF16 before" in " ".join(shown.split())
    assert "beam_moe_finalize" in shown
    with pytest.raises(SystemExit) as ended:
        main(["rules", "Round", "TAIL"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    listed_ids = [line.split()[1] for line in shown.splitlines() if line.startswith("rule:")]
    assert listed_ids == [*(rule.id for rule in RULES if rule.kind.value == "ROUND"), "TAIL"]
    with pytest.raises(SystemExit):
        main(["cases", "--rule", "ROUND", "--ranks", "1,2"])
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert {row[0] for row in rows} == {rule.id for rule in RULES if rule.kind.value == "ROUND"}
    assert {row[1] for row in rows} <= {item.name for item in OPERATIONS}
    assert len({tuple(row) for row in rows}) == len(rows)


# A project of somebody's: a package called as one of our folders, options called as ours.
THEIRS = {
    "kernels/__init__.py": "MINE = True\n",
    "conformance.py": "MINE = True\n",
    "conftest.py": (
        "def pytest_addoption(parser):\n    parser.addoption('--device', default='theirs')\n"
        "    parser.addoption('--rule', default='theirs')\n"
    ),
    "test_theirs.py": (
        "import sys\nimport conformance\nimport kernels\n\n\n"
        "def test_imports_are_theirs(pytestconfig):\n"
        "    assert kernels.MINE and conformance.MINE\n"
        "    assert not [path for path in sys.path if path.rstrip('/').endswith('moetail')]\n"
    ),
}


def test_other_projects_are_left_alone(tmp_path: Path, kernel: Path) -> None:
    for name, text in THEIRS.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    done = run(tmp_path, "-m", "pytest", "-q", "test_theirs.py", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "moetail" not in done.stdout

    # The suite runs in their project, with pytest's own import mode, and gives check's verdict.
    # An option that is called as one of theirs has a longer name too.
    done = run(
        tmp_path,
        *("-m", "pytest", "-q", "--pyargs", "moetail.conformance.suite", "test_theirs.py"),
        *("--impl", "kernel.py", "--moetail-rule", "ROUND-2", "--moetail-rule=ROUND-3"),
        *("-p", "no:cacheprovider"),
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ROUND-2 violated by beam_moe_finalize" in done.stdout
    assert "VIOLATES ROUND-2: " in done.stdout
    assert "test_theirs.py" not in done.stdout.split("short test summary")[-1]


def test_pytest_selects_by_marker_and_runs_in_parallel(tmp_path: Path, kernel: Path) -> None:
    words = ("-m", "pytest", "-q", "--pyargs", "moetail.conformance.suite", "--impl", "kernel.py")
    chosen = (
        "--op=finalize",
        "-m",
        "rule(id='ROUND-2') and operation(name='beam_moe_finalize')",
        "-n",
        "2",
    )
    done = run(tmp_path, *words, *chosen, "-p", "no:cacheprovider")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ROUND-2 violated by beam_moe_finalize" in done.stdout
    assert "VIOLATES ROUND-2: " in done.stdout
    assert "warning" not in done.stdout.lower()


def test_pytest_alone_ends_with_3_where_nothing_was_judged(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("", encoding="utf-8")
    words = ("-m", "pytest", "-q", "--pyargs", "moetail.conformance.suite", "--impl", "empty.py")
    done = run(tmp_path, *words, "-p", "no:cacheprovider")
    assert done.returncode == 3, done.stdout + done.stderr
