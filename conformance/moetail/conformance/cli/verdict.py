"""``moetail check`` and ``moetail judge``: a verdict, in the terminal and as files."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from moetail.conformance.cli.folder import make_folder
from moetail.conformance.cli.options import takes
from moetail.conformance.cli.progress import Progress
from moetail.conformance.run.options import OPTIONS, Request
from moetail.conformance.run.results import NOT_JUDGED, Results, count

__all__ = ["check", "judge"]

Summary = Annotated[
    Path | None, typer.Option(help="Append a summary, as Markdown for a CI job, to this file.")
]


@takes(*OPTIONS)
def check(
    report: Annotated[
        Path | None,
        typer.Option(
            help="Write report.html, report.json, junit.xml, badge.json into this folder."
        ),
    ] = None,
    summary: Summary = None,
    **words: Any,
) -> None:
    """Judge an implementation against the contract.

    Exit code: 0 conforms, 1 violates, 2 usage, or the run ended early and found no violation, 3
    nothing was judged.
    """
    from moetail.conformance.adapters import not_mapped, versions
    from moetail.conformance.report import check_summary

    # The cases are small: threads would cost more than they bring, and take the ranks' cores.
    torch.set_num_threads(1)
    request = Request.parse(words)
    folder = make_folder("--report", report)
    if summary is not None:
        check_summary(summary)

    results = _run(request)
    target = request.implementation.target
    results.plan.update(versions(target))
    console = wide_console()
    for fault in results.faults:
        console.print(fault, markup=False)
    if results.trials:
        _print_matrix(results, console)
    for name, why in not_mapped(target).items():
        console.print(f"Not mapped: {name}: {why}", markup=False, soft_wrap=True)
    if results.verdict != NOT_JUDGED:
        for why in _undecided(results):
            console.print(f"Not judged: {why}", markup=False, soft_wrap=True)
    if results.stopped:
        console.print(f"The run ended early: {results.stopped}.", markup=False)
    _leave(results, folder, summary, console)
    if results.verdict != NOT_JUDGED and (to_fill := _to_fill(results.implementation)):
        console.print(to_fill, markup=False)
    _end(results, results, console)


def judge(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Dumps, as moetail's capture saves them."),
    ],
    report: Annotated[
        Path | None,
        typer.Option(help="Write report.html, report.json, junit.xml into this folder."),
    ] = None,
    summary: Summary = None,
) -> None:
    """Judge saved calls, without the kernel; the files of a distributed call's ranks together.

    Exit code: 0 conforms, 1 violates, 2 usage or a file that cannot be read, 3 nothing was judged.
    """
    from moetail.conformance.dumps import judge_dumps, load_dump
    from moetail.conformance.report import check_summary
    from moetail.spec.rules import OPERATIONS

    console = wide_console()
    folder = make_folder("--report", report)
    if summary is not None:
        check_summary(summary)
    with console.status("reading"):
        dumps = [load_dump(path) for path in files]
    with console.status("judging"):
        results = judge_dumps(dumps)
    _print_matrix(results, console)
    _leave(results, folder, summary, console)
    # A dump says nothing about what else its implementation provides.
    every = tuple(item.name for item in OPERATIONS)
    _end(results, replace(results, provided=every), console)


def _run(request: Request) -> Results:
    """Every trial that was asked for; SIGTERM and Ctrl-C end it with what was judged until then."""
    from moetail.conformance.run.check import planned
    from moetail.conformance.run.runner import run_planned
    from moetail.conformance.run.subject import Subject
    from moetail.conformance.suite import checks

    subject = Subject(request.implementation, request.plan)
    restricted = {"operations": request.operations, "rules": request.rules}
    results = Results.of(request.implementation, request.plan, **restricted)
    trials = list(
        planned(checks(), request.plan, results.provided, case=request.case, **restricted)
    )
    try:
        with _terminated_as_interrupted(), Progress() as progress:

            def watch(name: str) -> None:
                done = len(results.trials) + len(results.faults)
                progress.show(done, len(trials), name.removeprefix("test_").replace("_", " "))

            run_planned(subject, trials, results, watch)
    except KeyboardInterrupt:
        results.stopped = "interrupted"
    finally:
        subject.close()
    return results


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


def wide_console() -> Console:
    """Wide enough for the matrix where nobody's window says otherwise."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        return Console(highlight=False, width=120)
    return console


def _print_matrix(results: Results, console: Console) -> None:
    """Rules by operations, and the smallest violations."""
    from moetail.conformance.report.terminal import matrix_table, violation_text

    console.print(matrix_table(results, console.width))
    for violation in results.violations:
        console.print(violation_text(violation), markup=False, soft_wrap=True)
        console.print()


def _leave(results: Results, folder: Path | None, summary: Path | None, console: Console) -> None:
    """What stays behind: the report and the summary, where they are asked for."""
    from moetail.conformance.report import append_summary, write_report

    if folder is not None:
        write_report(results, folder)
        console.print(f"Report: {folder / 'report.html'}", markup=False, soft_wrap=True)
    if summary is not None:
        append_summary(results, summary)


def _end(results: Results, shown: Results, console: Console) -> None:
    """The last line, which is of the results shown, and the exit code."""
    from moetail.conformance.report.terminal import verdict_line

    if results.verdict == NOT_JUDGED:
        console.print(_why_nothing(results), markup=False)
    console.print(verdict_line(shown), markup=False, soft_wrap=True)
    raise typer.Exit(results.exit_code)


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
