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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from moetail.conformance.run.check import Check
    from moetail.conformance.run.plan import Plan
    from moetail.conformance.run.results import Results, TrialResult
    from moetail.conformance.run.subject import Subject
    from moetail.conformance.run.trial import Trial

SUITE = "moetail.conformance.suite"
_SUITE_PATH = Path(__file__).parent / "suite"
_RESULTS: pytest.StashKey[Results] = pytest.StashKey()
_PLAN: pytest.StashKey[Plan] = pytest.StashKey()
_ASKED: pytest.StashKey[bool] = pytest.StashKey()


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
    # Only when the suite is asked for: names like --device are common in other projects.
    asked = any(_names_suite(argument) for argument in args)
    early_config.stash[_ASKED] = asked
    if not asked:
        return
    group = parser.getgroup("moetail", "conformance of the MoE tail")
    group.addoption(
        "--impl",
        default="reference",
        metavar="IMPL",
        help="what to judge: reference, kernels, a module, module:attribute, or a .py file",
    )
    group.addoption("--op", action="append", default=[], help="only this operation (repeatable)")
    group.addoption("--rule", action="append", default=[], help="only this rule (repeatable)")
    group.addoption("--device", default="cpu", help="cpu or cuda")
    group.addoption("--ranks", default="1,2,3,4,8", help="numbers of ranks, such as 1,2,4")
    group.addoption(
        "--virtual-ranks",
        action="store_true",
        help="all ranks on one GPU, with workspaces from BeamAllReduceWorkspace.virtual",
    )
    group.addoption("--profile", default="quick", help="quick, full or soak")
    group.addoption("--case", default="", help="only the trial of this id")
    group.addoption("--seed", default="0", help="shifts the seed of every case")
    group.addoption("--rank-timeout", default="60", help="seconds for one distributed call")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "rule(id=): the rule of the contract that a test decides")
    config.addinivalue_line("markers", "operation(name=): the operation that is on trial")
    if not config.stash.get(_ASKED, False):
        return
    from moetail.conformance.implementation import UsageError

    try:
        _configure(config)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None


def _configure(config: pytest.Config) -> None:
    from moetail.conformance.implementation import load
    from moetail.conformance.run.options import case_named, make_plan, operations_named, rules_named
    from moetail.conformance.run.results import Results

    option = config.getoption
    implementation = load(option("--impl"))
    plan = make_plan(
        profile=option("--profile"),
        seed=option("--seed"),
        ranks=option("--ranks"),
        device=option("--device"),
        timeout=option("--rank-timeout"),
        virtual_ranks=option("--virtual-ranks"),
        implementation=implementation,
    )
    case_named(option("--case"))
    config.stash[_PLAN] = plan
    config.stash[_RESULTS] = Results(
        implementation=implementation.spec,
        provided=implementation.provided,
        plan=plan.shown,
        operations=operations_named(option("--op")),
        rules=rules_named(option("--rule")),
    )


def results_of(config: pytest.Config) -> Results | None:
    """The results so far, where the suite was asked for."""
    return config.stash.get(_RESULTS, None)


# --- collection -----------------------------------------------------------------------------------


class _SuiteModule(pytest.Module):
    """A module of the suite, imported by its real name."""

    def _getobj(self) -> Any:
        return importlib.import_module(f"{SUITE}.{self.path.stem}")


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if path in (_SUITE_PATH, _SUITE_PATH.parent):
        # A Package would import the folder's __init__ through sys.path.
        return pytest.Dir.from_parent(parent, path=path)
    return None


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> Any:
    if module_path.parent == _SUITE_PATH and parent.config.stash.get(_ASKED, False):
        return _SuiteModule.from_parent(parent, path=module_path)
    return None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    check: Check | None = getattr(metafunc.function, "moetail_check", None)
    results = results_of(metafunc.config)
    if check is None or results is None:
        return
    from moetail.conformance.run.options import trials_asked

    trials = trials_asked(
        check,
        metafunc.config.stash[_PLAN],
        results.provided,
        operations=results.operations,
        rules=results.rules,
        case=metafunc.config.getoption("--case"),
    )
    metafunc.parametrize("trial", trials, ids=[trial.id for trial in trials])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if results_of(config) is None:
        return
    for item in items:  # before pytest selects by -m
        check, trial = _check(item), _trial(item)
        if check is not None and trial is not None:
            item.add_marker(pytest.mark.rule(id=check.rule))
            item.add_marker(pytest.mark.operation(name=trial.operation))
    # A test without trials is one whose rule or operation was not asked for, or is not provided.
    empty = [item for item in items if _check(item) is not None and _trial(item) is None]
    if empty:
        config.hook.pytest_deselected(items=empty)
        items[:] = [item for item in items if item not in empty]


def _check(item: pytest.Item) -> Check | None:
    return getattr(getattr(item, "function", None), "moetail_check", None)


def _trial(item: pytest.Item) -> Trial | None:
    params = getattr(getattr(item, "callspec", None), "params", {})
    trial = params.get("trial")
    return trial if hasattr(trial, "case") else None


# --- running --------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def subject(pytestconfig: pytest.Config) -> Iterator[Subject]:
    """The implementation on trial; its rank processes live as long as the session."""
    from moetail.conformance.run.subject import Subject

    made = Subject.of(pytestconfig.getoption("--impl"), pytestconfig.stash[_PLAN])
    yield made
    made.close()


_OUTCOME: pytest.StashKey[TrialResult] = pytest.StashKey()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    check = _check(pyfuncitem)
    if check is None or results_of(pyfuncitem.config) is None:
        return None
    from moetail.conformance.run.runner import attempt
    from moetail.conformance.run.trial import NotJudged, Violation

    arguments: dict[str, Any] = pyfuncitem.funcargs
    result, error = attempt(check, arguments["subject"], arguments["trial"])
    pyfuncitem.stash[_OUTCOME] = result
    pyfuncitem.user_properties += [
        ("rule", result.rule),
        ("operation", result.operation),
        ("case", result.case),
        ("judged", str(result.judged)),
    ]
    if isinstance(error, Violation):
        raise error
    if isinstance(error, NotJudged):
        pytest.skip(f"not judged: {error}")
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    result = item.stash.get(_OUTCOME, None)
    if result is not None and call.when == "call":
        from dataclasses import asdict

        # A plain dict survives the way from a worker of pytest-xdist.
        report.moetail = asdict(result)  # type: ignore[attr-defined]
        if report.failed:
            from moetail.conformance.report.terminal import violation_text

            report.longrepr = violation_text(result)
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    fields = getattr(report, "moetail", None)
    if fields is not None and _controller is not None:
        from moetail.conformance.run.results import TrialResult

        _controller.trials.append(TrialResult(**fields))


_controller: Results | None = None


def pytest_sessionstart(session: pytest.Session) -> None:
    # Reports come without their config, so the run's results are found through the module.
    global _controller
    _controller = results_of(session.config)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    results = results_of(session.config)
    if results is None or hasattr(session.config, "workerinput"):
        return
    if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        # A run that judged nothing is not green.
        session.exitstatus = results.exit_code


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    results = results_of(config)
    if results is None or config.getoption("collectonly", False):
        return
    from moetail.conformance.report.terminal import summary_text

    terminalreporter.section("moetail")
    terminalreporter.write_line(summary_text(results, width=terminalreporter._tw.fullwidth))


def pytest_report_header(config: pytest.Config) -> list[str]:
    results = results_of(config)
    if results is None:
        return []
    plan = ", ".join(f"{name} {value}" for name, value in results.plan.items())
    return [f"moetail: judging {results.implementation} ({plan})"]
