"""The command line: moetail check, rules, cases."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from moetail.conformance import plugin
from moetail.conformance.implementation import UsageError
from moetail.conformance.report import markdown
from moetail.conformance.run.results import NOT_JUDGED, Results, count

__all__ = ["app", "main"]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Does a kernel obey the contract of the MoE tail, and if not, which rule does it break?",
)

_USAGE = 2


def _bar(console: Console) -> Progress:
    """A progress bar, silent where nobody watches."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


class _Progress:
    """Shows the run as a bar, in pytest's place."""

    def __init__(self, console: Console) -> None:
        self._bar = _bar(console)
        self.results: Results | None = None
        self.failures: list[str] = []

    def pytest_configure(self, config: pytest.Config) -> None:
        self.results = plugin.results_of(config)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._task = self._bar.add_task("collecting", total=len(session.items))
        self._bar.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        name = nodeid.rsplit("::", 1)[-1].partition("[")[0]
        self._bar.update(self._task, description=name.removeprefix("test_").replace("_", " ")[:60])

    def pytest_runtest_logfinish(self) -> None:
        self._bar.advance(self._task)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # What is no verdict on the implementation is a fault of the suite or of the machine.
        if report.failed and not hasattr(report, "moetail"):
            self.failures.append(f"{report.nodeid} ({report.when})\n{report.longreprtext}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failures.append(f"{report.nodeid}\n{report.longreprtext}")

    def pytest_sessionfinish(self) -> None:
        self._bar.stop()


def _run_pytest(arguments: list[str], console: Console) -> tuple[int, _Progress]:
    """pytest on the suite alone: no configuration, no plugins of the folder it runs in."""
    progress = _Progress(console)
    isolated = [
        "--pyargs",
        plugin.SUITE,
        "-c",
        os.devnull,
        "--rootdir",
        str(Path(plugin.__file__).parent),
        "-p",
        "no:terminal",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:faulthandler",
        "-p",
        plugin.__name__,
    ]
    before = os.environ.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    try:
        with _terminated_as_interrupted():
            code = pytest.main([*isolated, *arguments], plugins=[progress])
    finally:
        if before is None:
            del os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"]
        else:
            os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = before
    return int(code), progress


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM, by which a time limit ends a run, ends it as Ctrl-C does: with its report."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may say what a signal does
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@app.command()
def check(
    impl: Annotated[
        str,
        typer.Argument(
            metavar="[IMPL]",
            help="reference, kernels, vllm, flashinfer, a module, module:attribute, or a .py file",
        ),
    ] = "reference",
    op: Annotated[
        list[str] | None, typer.Option(help="Only this operation, by its name or column heading.")
    ] = None,
    rule: Annotated[
        list[str] | None, typer.Option(help="Only this rule, or all of a kind, such as ROUND.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu or cuda; by default cuda for kernels where there is a GPU.")
    ] = "",
    ranks: Annotated[
        str, typer.Option(help="Numbers of ranks for distributed operations.")
    ] = "1,2,3,4,8",
    virtual_ranks: Annotated[
        bool,
        typer.Option(
            "--virtual-ranks",
            help="Run all ranks on one GPU, each on a stream of its own, with workspaces from "
            "the implementation's BeamAllReduceWorkspace.virtual.",
        ),
    ] = False,
    profile: Annotated[str, typer.Option(help="quick, full or soak.")] = "quick",
    case: Annotated[str, typer.Option(help="Only the trial of this id.")] = "",
    seed: Annotated[int, typer.Option(help="Shifts the seed of every case.")] = 0,
    rank_timeout: Annotated[int, typer.Option(help="Seconds for one distributed call.")] = 60,
    report: Annotated[
        Path | None,
        typer.Option(
            help="Write report.html, report.json, junit.xml, badge.json into this folder."
        ),
    ] = None,
    summary: Annotated[
        Path | None, typer.Option(help="Append a summary in Markdown to this file.")
    ] = None,
    require_gpu: Annotated[
        bool, typer.Option("--require-gpu", help="Fail where there is no GPU.")
    ] = False,
) -> None:
    """Judge an implementation against the contract.

    Exit code: 0 conforms, 1 violates, 2 usage, 3 nothing was judged.
    """
    from moetail.conformance.adapters import not_mapped, versions
    from moetail.conformance.implementation import load
    from moetail.conformance.report import append_summary, check_summary, write_report
    from moetail.conformance.report.terminal import matrix_table, verdict_line, violation_text
    from moetail.conformance.run.options import case_named, make_plan, operations_named, rules_named

    console = _console()
    # Whatever hypothesis keeps is of no use in the folder that the command runs in.
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", tempfile.gettempdir() + "/moetail")
    # The cases are small: threads would cost more than they bring, and take the ranks' cores.
    torch.set_num_threads(1)
    device = _device(impl, device, require_gpu)
    implementation = load(impl)
    make_plan(
        profile=profile,
        seed=seed,
        ranks=ranks,
        device=device,
        timeout=rank_timeout,
        virtual_ranks=virtual_ranks,
        implementation=implementation,
    )
    operations, rules = operations_named(op or []), rules_named(rule or [])
    case_named(case)

    arguments = ["--impl", implementation.spec, "--device", device, "--ranks", ranks]
    arguments += ["--profile", profile, "--seed", str(seed), "--rank-timeout", str(rank_timeout)]
    arguments += ["--virtual-ranks"] if virtual_ranks else []
    arguments += [word for name in operations for word in ("--op", name)]
    arguments += [word for name in rules for word in ("--rule", name)]
    if case:
        arguments += ["--case", case]
    report = _folder(report)
    if summary is not None:
        check_summary(summary)
    if report is not None:
        arguments += ["--junit-xml", str(report / "junit.xml")]

    code, progress = _run_pytest(arguments, console)
    results = progress.results
    if results is None:
        raise typer.Exit(_USAGE)
    if code == int(pytest.ExitCode.INTERRUPTED):
        results.stopped = "interrupted"
    for failure in progress.failures:
        console.print(failure, markup=False)
    if progress.failures:
        results.stopped = f"{len(progress.failures)} tests of the suite could not run"
    results.plan.update(versions(implementation.target))
    if results.trials:
        console.print(matrix_table(results, console.width))
    for violation in results.violations:
        console.print(violation_text(violation), markup=False, soft_wrap=True)
        console.print()
    for name, why in not_mapped(implementation.target).items():
        console.print(f"Not mapped: {name}: {why}", markup=False, soft_wrap=True)
    if results.verdict != NOT_JUDGED:
        for why in _undecided(results):
            console.print(f"Not judged: {why}", markup=False, soft_wrap=True)
    if results.stopped:
        console.print(f"The run ended early: {results.stopped}.", markup=False)
    if report is not None:
        write_report(results, report)
        console.print(f"Report: {report / 'report.html'}", markup=False, soft_wrap=True)
    if summary is not None:
        append_summary(results, summary)
    if results.verdict == NOT_JUDGED:
        console.print(_why_nothing(results), markup=False)
    elif to_fill := _to_fill(results.implementation):
        console.print(to_fill, markup=False)
    console.print(verdict_line(results), markup=False, soft_wrap=True)
    raise typer.Exit(results.exit_code)


def _console() -> Console:
    """Wide enough for the matrix where nobody's window says otherwise."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        return Console(highlight=False, width=120)
    return console


def _folder(report: Path | None) -> Path | None:
    """The folder of a report, made where it is not there."""
    if report is None:
        return None
    folder = report.expanduser().resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--report: {folder}: {error.strerror}; allowed: a folder") from None
    return folder


def _device(impl: str, device: str, require_gpu: bool) -> str:
    has_gpu = torch.cuda.is_available()
    if require_gpu and not has_gpu:
        raise UsageError("--require-gpu: torch finds no GPU here; allowed: a machine with one")
    if device:
        return device
    return "cuda" if has_gpu and (require_gpu or impl == "kernels") else "cpu"


def _why_nothing(results: Results) -> str:
    from moetail.spec.rules import OPERATIONS

    if not results.provided and (to_fill := _to_fill(results.implementation)):
        return f"{results.implementation} provides no operation yet. {to_fill}"
    if not results.provided:
        names = ", ".join(item.name for item in OPERATIONS)
        return f"{results.implementation} provides none of the operations: {names}."
    reasons = sorted({trial.found for trial in results.trials if trial.found})
    return "\n".join(reasons) or "No trial fits what was asked for."


def _undecided(results: Results) -> list[str]:
    """Why some cases were not judged, the most frequent reasons first."""
    reasons = Counter(trial.found for trial in results.trials if trial.status == NOT_JUDGED)
    return [f"{count(number, 'case')}: {why}" for why, number in reasons.most_common(5)]


def _to_fill(implementation: str) -> str:
    """What is left of a file that ``moetail init`` wrote."""
    from moetail.conformance.export.template import TODO, unfilled
    from moetail.conformance.implementation import load

    names = unfilled(load(implementation).target)
    if not names:
        return ""
    return f"To be filled: {', '.join(names)}. Take {TODO} off the names of those that are."


@app.command()
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The .py file to write.")],
    op: Annotated[
        list[str] | None, typer.Option(help="Only this operation (repeatable); by default all.")
    ] = None,
) -> None:
    """Write a template of a kernel's file, with the operations to fill.

    It runs at once: what is not filled is not provided, and so not judged.
    """
    from moetail.conformance.export.template import TODO, write_template
    from moetail.conformance.run.options import operations_named

    names = write_template(file, operations_named(op or []))
    typer.echo(f"{file}: {len(names)} to fill: {', '.join(names)}")
    again = shlex.join(["moetail", "check", str(file)])
    typer.echo(f"Fill one, take {TODO} off its name, and run: {again}")


@app.command()
def rules(
    rule: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="Show this rule whole.")
    ] = None,
) -> None:
    """The rules of the contract."""
    from moetail.conformance.report.terminal import rules_text
    from moetail.conformance.run.options import rules_named

    if rule is not None:
        rules_named([rule])
    typer.echo(rules_text(rule))


@app.command()
def cases(
    op: Annotated[list[str] | None, typer.Option(help="Only this operation.")] = None,
    rule: Annotated[list[str] | None, typer.Option(help="Only this rule.")] = None,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks.")] = "1,2,3,4,8",
    profile: Annotated[str, typer.Option(help="quick, full or soak.")] = "quick",
    seed: Annotated[int, typer.Option(help="Shifts the seed of every case.")] = 0,
) -> None:
    """The cases that check would try: rule, operation and id, one a line."""
    from moetail.conformance.run.options import (
        load_checks,
        make_plan,
        operations_named,
        rules_named,
        trials_asked,
    )
    from moetail.spec.rules import OPERATIONS

    plan = make_plan(profile=profile, seed=seed, ranks=ranks)
    every = tuple(item.name for item in OPERATIONS)
    operations, named = operations_named(op or []), rules_named(rule or [])
    number = 0
    for item in load_checks():
        for trial in trials_asked(item, plan, every, operations=operations, rules=named):
            typer.echo(f"{item.rule}\t{trial.operation}\t{trial.id}")
            number += 1
    if number == 0:
        typer.echo("no case fits what was asked for", err=True)
        raise typer.Exit(3)


@app.command()
def mutants(
    only: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]...", help="Only these mutants or variants.")
    ] = None,
    profile: Annotated[str, typer.Option(help="quick, full or soak.")] = "quick",
    seed: Annotated[int, typer.Option(help="Shifts the seed of every case.")] = 0,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks.")] = "1,2,3",
    workers: Annotated[int, typer.Option(min=1, help="Processes, each with its ranks.")] = 2,
    report: Annotated[
        Path | None, typer.Option(help="Write mutants.json into this folder.")
    ] = None,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Also what the criteria of public tests would have said."),
    ] = False,
    into: Annotated[
        Path | None,
        typer.Option(help="With --compare: put the table into this Markdown file, at its markers."),
    ] = None,
) -> None:
    """Put the catalogue to the suite: broken implementations and legal variants of the reference.

    Exit code: 0 where every mutant was killed by its rule first and every variant accepted, else 1.
    """
    import json
    from dataclasses import asdict

    from moetail.conformance.catalogue import MUTANTS
    from moetail.conformance.catalogue.variants import VARIANTS
    from moetail.conformance.report.terminal import mutants_tables
    from moetail.conformance.run.options import make_plan
    from moetail.conformance.run.results import environment
    from moetail.conformance.score.table import Row, run_catalogue

    known = [item.id for item in MUTANTS] + [item.id for item in VARIANTS]
    unknown = [name for name in only or [] if name not in known]
    if unknown:
        raise UsageError(f"ID: {unknown[0]!r}; allowed: {', '.join(known)}")
    plan = make_plan(profile=profile, seed=seed, ranks=ranks)
    folder = _folder(report)
    if into is not None:
        if not compare:
            raise UsageError("--into: given without --compare, whose table it is for")
        markdown.find(into)
    console = _console()
    bar = _bar(console)
    task = bar.add_task("mutants and variants", total=None)

    def advance(row: Row, done: int, total: int) -> None:
        bar.update(task, completed=done, total=total, description=row.id)

    with bar:
        table = run_catalogue(plan, workers=workers, only=only or (), progress=advance)
    for part in mutants_tables(table):
        console.print(part)
    if folder is not None:
        content = {
            "environment": environment("cpu"),
            "plan": plan.shown,
            "seconds": round(table.seconds, 1),
            "rows": [asdict(row) for row in table.rows],
        }
        (folder / "mutants.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        console.print(f"Report: {folder}", markup=False, soft_wrap=True)
    if compare:
        from moetail.conformance.score.compare import compare as compare_criteria
        from moetail.conformance.score.compare import markdown as written

        lines = compare_criteria(seed)
        missed = sum(not row.killed for row in table.mutants if row.id in _value_mutants())
        text = written(lines, None if only else (missed, len(table.false_alarms)))
        console.print(text, markup=False, soft_wrap=True)
        if into is not None:
            markdown.replace(into, text)
    raise typer.Exit(table.exit_code)


def _value_mutants() -> set[str]:
    """The mutants that change values, which is what a tolerance can look at."""
    from moetail.conformance.diagnosis import DEVIATIONS

    return {item.id for item in DEVIATIONS}


@app.command()
def judge(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Dumps, as moetail's capture saves them."),
    ],
    report: Annotated[
        Path | None, typer.Option(help="Write report.json and report.html into this folder.")
    ] = None,
) -> None:
    """Judge saved calls, without the kernel; the files of a distributed call's ranks together.

    Exit code: 0 conforms, 1 violates, 2 usage or a file that cannot be read, 3 nothing was judged.
    """
    from dataclasses import replace

    from moetail.conformance.dumps import judge_dumps, load_dump
    from moetail.conformance.report import write_report
    from moetail.conformance.report.terminal import matrix_table, verdict_line, violation_text
    from moetail.spec.rules import OPERATIONS

    console = _console()
    folder = _folder(report)
    with console.status("reading"):
        dumps = [load_dump(path) for path in files]
    with console.status("judging"):
        results = judge_dumps(dumps)
    console.print(matrix_table(results, console.width))
    for violation in results.violations:
        console.print(violation_text(violation), markup=False, soft_wrap=True)
        console.print()
    if folder is not None:
        write_report(results, folder)
        console.print(f"Report: {folder}", markup=False, soft_wrap=True)
    if results.verdict == NOT_JUDGED:
        console.print(_why_nothing(results), markup=False)
    # A dump says nothing about what else its implementation provides.
    every = tuple(item.name for item in OPERATIONS)
    line = verdict_line(replace(results, provided=every))
    console.print(line, markup=False, soft_wrap=True)
    raise typer.Exit(results.exit_code)


@app.command("definitions")
def write_flashinfer_bench(
    out: Annotated[Path, typer.Option(help="Folder of the trace set.")],
    model: Annotated[
        str, typer.Option(help="Whose dimensions and routing the workloads have.")
    ] = "deepseek-v3",
) -> None:
    """The operations as FlashInfer-Bench Definitions, with workloads."""
    from moetail.conformance.export.definitions import write_definitions

    torch.set_num_threads(1)
    folder = out.expanduser().resolve()
    try:
        written = write_definitions(folder, model=model, after=typer.echo)
    except OSError as error:
        raise UsageError(f"--out: {folder}: {error.strerror}; allowed: a folder") from None
    typer.echo(f"{len(written)} definitions with their workloads: {folder}")


def main(arguments: list[str] | None = None) -> Any:
    """Entry point of the ``moetail`` command."""
    try:
        return app(args=arguments, standalone_mode=True)
    except UsageError as error:
        print(f"moetail: {error}", file=sys.stderr)
        sys.exit(_USAGE)
