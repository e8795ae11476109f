"""``moetail check`` and ``moetail judge``: a verdict, in the terminal and as files."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from moetail.conformance.cli.folder import make_folder
from moetail.conformance.cli.options import takes
from moetail.conformance.cli.progress import Progress
from moetail.conformance.report.terminal import folded
from moetail.conformance.run.options import OPTIONS, Request
from moetail.conformance.run.results import NOT_JUDGED, Results, harmless

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
    from moetail.conformance.report.terminal import not_judged_lines

    # The cases are small: threads would cost more than they bring, and take the ranks' cores.
    torch.set_num_threads(1)
    request = Request.parse(words)
    folder = make_folder("--report", report)
    if summary is not None:
        check_summary(summary)

    results = _run(request)
    target = request.implementation.target
    results.plan.update(versions(target))
    with printing(results.exit_code) as console:
        for fault in results.faults:
            say(fault)
        _print_matrix(results, console)
        for name, why in not_mapped(target).items():
            say(folded(f"Not mapped: {name}: {why}", console.width))
        if results.verdict != NOT_JUDGED:
            for line in not_judged_lines(results, console.width):
                say(line)
        if results.stopped:
            say(folded(f"The run ended early: {results.stopped}.", console.width))
        _leave(results, folder, summary)
        if results.verdict != NOT_JUDGED and (to_fill := _to_fill(results.implementation)):
            say(folded(to_fill, console.width))
        _print_verdict(results, results, console)


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

    folder = make_folder("--report", report)
    if summary is not None:
        check_summary(summary)
    status = Console(stderr=True)
    with status.status("reading"):
        dumps = [load_dump(path) for path in files]
    with status.status("judging"):
        results = judge_dumps(dumps)
    # A dump says nothing about what else its implementation provides.
    every = tuple(item.name for item in OPERATIONS)
    with printing(results.exit_code) as console:
        _print_matrix(results, console)
        _leave(results, folder, summary)
        _print_verdict(results, replace(results, provided=every), console)


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
        results.stopped = results.stopped or "interrupted"
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


@contextlib.contextmanager
def printing(code: int) -> Iterator[Console]:
    """What is printed, by a console of its width, and then the exit code, whatever became of it."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        # Wide enough for the matrix where nobody's window says otherwise.
        console = Console(highlight=False, width=120)
    try:
        yield console
    except OSError as error:
        complain([f"standard output: {error.strerror}"])
    raise typer.Exit(code)


def say(text: str) -> None:
    """A text as it is, apart from what a terminal would act on."""
    print(harmless(text))


def complain(lines: Iterable[str]) -> None:
    """What could not be written."""
    for line in filter(None, lines):
        print(f"moetail: {harmless(line)}", file=sys.stderr)


def _print_matrix(results: Results, console: Console) -> None:
    """Rules by operations, and the smallest violations."""
    from moetail.conformance.report.terminal import matrix_tables, violation_texts

    for part in matrix_tables(results, console.width) if results.trials else ():
        console.print(part)
    for text in violation_texts(results, console.width):
        say(f"{text}\n")


def _leave(results: Results, folder: Path | None, summary: Path | None) -> None:
    """What stays behind: the report and the summary, where they are asked for."""
    from moetail.conformance.report import append_summary, write_report

    if folder is not None:
        complaints = write_report(results, folder)
        complain(complaints)
        if not complaints:
            say(f"Report: {folder / 'report.html'}")
    if summary is not None:
        complain([append_summary(results, summary)])


def _print_verdict(results: Results, shown: Results, console: Console) -> None:
    """The last line, which is of the results shown."""
    from moetail.conformance.report.terminal import verdict_line

    if results.verdict == NOT_JUDGED:
        say(_why_nothing(results))
    say(folded(verdict_line(shown), console.width))


def _why_nothing(results: Results) -> str:
    from moetail.spec.rules import OPERATIONS

    if not results.provided and (to_fill := _to_fill(results.implementation)):
        return f"{results.implementation} provides no operation yet. {to_fill}"
    if not results.provided:
        names = ", ".join(item.name for item in OPERATIONS)
        return f"{results.implementation} provides none of the operations: {names}."
    reasons = sorted({trial.found for trial in results.trials if trial.found})
    return "\n".join(reasons) or "No trial fits what was asked for."


def _to_fill(implementation: str) -> str:
    """What is left of a file that ``moetail init`` wrote."""
    from moetail.conformance.export.template import TODO, unfilled
    from moetail.conformance.implementation import load

    names = unfilled(load(implementation).target)
    if not names:
        return ""
    return f"To be filled: {', '.join(names)}. Take {TODO} off the names of those that are."
