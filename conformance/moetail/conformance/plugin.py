"""The pytest plugin: options, collection and results of the suite.

pytest loads it in every run of every project that has moetail installed, so it imports nothing of
weight, and does nothing unless the suite is asked for.

The suite lies in a namespace package. pytest's own collectors would put the folder ``moetail`` on
sys.path and import ``conformance.suite...`` from there, and then ``import kernels`` in somebody's
project would find ours. The collectors here import the suite by its real name and touch no path.
"""

from __future__ import annotations

import importlib
from collections.abc import Generator, Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from moetail.conformance.run.check import Check
    from moetail.conformance.run.options import Request
    from moetail.conformance.run.results import Results, TrialResult
    from moetail.conformance.run.subject import Subject
    from moetail.conformance.run.trial import Trial

SUITE = "moetail.conformance.suite"
_SUITE_PATH = Path(__file__).parent / "suite"
_ASKED: pytest.StashKey[bool] = pytest.StashKey()
_PREFIX = "moetail-"


def _names_suite(argument: str) -> bool:
    name, _, _ = argument.partition("::")
    if name == SUITE or name.startswith(f"{SUITE}."):
        return True
    path = Path(name)
    return path.exists() and path.resolve().is_relative_to(_SUITE_PATH)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser, args: list[str]
) -> None:
    asked = any(_names_suite(argument) for argument in args)
    early_config.stash[_ASKED] = asked
    if not asked:
        return
    from moetail.conformance.run.options import OPTIONS

    group = parser.getgroup("moetail", "conformance of the MoE tail")
    given = {argument.partition("=")[0] for argument in args}
    for key, option in OPTIONS.items():
        # Names like --device are common, and two options of one name are an error. So the short
        # ones are taken only where they are used; the others are nobody else's.
        short = f"--{option.name}"
        names = [f"--{_PREFIX}{option.name}", *([short] if short in given else [])]
        how: dict[str, Any] = {"metavar": option.metavar or "TEXT", "default": option.default}
        if isinstance(option.default, bool):
            how = {"action": "store_true"}
        elif isinstance(option.default, tuple):
            how |= {"action": "append", "default": []}
        group.addoption(*names, dest=f"moetail_{key}", help=f"{option.help} Also: {short}", **how)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "rule(id=): the rule of the contract that a test decides")
    config.addinivalue_line("markers", "operation(name=): the operation that is on trial")
    if not config.stash.get(_ASKED, False):
        return
    from moetail.conformance.implementation import UsageError
    from moetail.conformance.run.options import OPTIONS, Request

    try:
        request = Request.parse({key: config.getoption(f"moetail_{key}") for key in OPTIONS})
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None
    config.pluginmanager.register(_Run(config, request), "moetail-run")


class _SuiteFile(pytest.File):
    """A module of the suite, imported by its real name; its tests are the trials of its checks."""

    run: _Run

    def collect(self) -> Iterator[pytest.Item]:
        module = importlib.import_module(f"{SUITE}.{self.path.stem}")
        for check, trial in self.run.trials_in(module):
            name = f"{check.name}[{trial.id}]"
            yield _TrialItem.from_parent(self, name=name, run=self.run, check=check, trial=trial)


class _TrialItem(pytest.Item):
    """One trial of a check."""

    def __init__(self, *, run: _Run, check: Check, trial: Trial, **rest: Any) -> None:
        super().__init__(**rest)
        self.run, self.check, self.trial = run, check, trial
        self.result: TrialResult | None = None
        self.lacking = ""  # what the machine lacked
        self.add_marker(pytest.mark.rule(id=check.rule))
        self.add_marker(pytest.mark.operation(name=trial.operation))

    def runtest(self) -> None:
        from moetail.conformance.run.ranks import PoolError
        from moetail.conformance.run.runner import run_trial
        from moetail.conformance.run.trial import NotJudged

        try:
            self.result, error = run_trial(self.check, self.run.subject, self.trial)
        except PoolError as fault:
            self.lacking = self.session.shouldstop = str(fault)
            raise
        self.user_properties += self.result.properties
        if isinstance(error, NotJudged):
            pytest.skip(f"not judged: {error}")
        if error is not None:
            raise error

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        from moetail.conformance.report.terminal import violation_text

        if self.lacking:
            return self.lacking
        if self.result is None:  # a fault of the suite
            return super().repr_failure(excinfo, style)
        return violation_text(self.result)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, self.name


class _Run:
    """The hooks of a run in which the suite was asked for."""

    def __init__(self, config: pytest.Config, request: Request) -> None:
        from moetail.conformance.run.results import Results

        self.config, self.request = config, request
        self.results: Results = Results.of(
            request.implementation, request.plan, request.operations, request.rules
        )
        self._subject: Subject | None = None

    @property
    def subject(self) -> Subject:
        """The implementation under test; its rank processes live as long as the session."""
        from moetail.conformance.run.subject import Subject

        if self._subject is None:
            self._subject = Subject(self.request.implementation, self.request.plan)
        return self._subject

    def trials_in(self, module: ModuleType) -> Iterator[tuple[Check, Trial]]:
        """The trials of a module of the suite that were asked for."""
        from moetail.conformance.run.check import planned
        from moetail.conformance.suite import checks_in

        asked = self.request
        return planned(
            checks_in(module),
            asked.plan,
            asked.implementation.provided,
            operations=asked.operations,
            rules=asked.rules,
            case=asked.case,
        )

    def pytest_report_header(self) -> list[str]:
        plan = ", ".join(f"{name} {value}" for name, value in self.results.plan.items())
        return [f"moetail: judging {self.results.implementation} ({plan})"]

    def pytest_collect_directory(
        self, path: Path, parent: pytest.Collector
    ) -> pytest.Collector | None:
        if path in (_SUITE_PATH, _SUITE_PATH.parent):
            # A Package would import the folder's __init__ through sys.path.
            return pytest.Dir.from_parent(parent, path=path)
        return None

    def pytest_pycollect_makemodule(self, module_path: Path, parent: pytest.Collector) -> Any:
        if module_path.parent != _SUITE_PATH:
            return None
        module = _SuiteFile.from_parent(parent, path=module_path)
        module.run = self
        return module

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if isinstance(item, _TrialItem) and item.lacking:
            report.moetail_lacking = item.lacking  # type: ignore[attr-defined]
        if isinstance(item, _TrialItem) and item.result is not None and call.when == "call":
            # A plain dict survives the way from a worker of pytest-xdist.
            report.moetail = asdict(item.result)  # type: ignore[attr-defined]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        from moetail.conformance.run.results import TrialResult

        self.results.stopped = getattr(report, "moetail_lacking", self.results.stopped)
        fields = getattr(report, "moetail", None)
        if fields is not None:
            self.results.trials.append(TrialResult(**fields))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self._subject is not None:
            self._subject.close()
        ended = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        if exitstatus in ended and not hasattr(self.config, "workerinput"):
            # A run that judged nothing is not green.
            session.exitstatus = self.results.exit_code

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        from moetail.conformance.report.terminal import summary_text

        if not self.config.getoption("collectonly", False):
            terminalreporter.section("moetail")
            width = terminalreporter._tw.fullwidth
            terminalreporter.write_line(summary_text(self.results, width=width))
