"""The suite: one module a chapter of the contract, one test a rule.

It runs against any implementation: ``moetail check IMPL``, or
``pytest --pyargs moetail.conformance.suite --impl IMPL``.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from functools import cache
from types import ModuleType

from moetail.conformance.run.check import Check, check_of, planned
from moetail.conformance.run.plan import Plan
from moetail.conformance.run.ranks import RankPool
from moetail.conformance.run.results import Results
from moetail.conformance.run.runner import run_planned
from moetail.conformance.run.subject import Subject

__all__ = ["checks", "checks_in", "run_suite"]


@cache
def checks() -> tuple[Check, ...]:
    """Every check, in the order in which they are believed."""
    names = [item.name for item in pkgutil.iter_modules(__path__) if item.name.startswith("test_")]
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    found = [check for module in modules for check in checks_in(module)]
    return tuple(sorted(found, key=lambda check: check.believed))


def checks_in(module: ModuleType) -> list[Check]:
    """The checks of one module, in its order."""
    return [check for item in vars(module).values() if (check := check_of(item)) is not None]


def run_suite(
    implementation: str,
    plan: Plan,
    *,
    pool: RankPool | None = None,
    operations: Sequence[str] = (),
    rules: Sequence[str] = (),
) -> Results:
    """Judge an implementation, check by check in the order in which checks are believed.

    Args:
        implementation: as :func:`moetail.conformance.implementation.load` takes it.
        plan: how much, and where.
        pool: rank processes to use; without one, own ones are started when needed and ended.
        operations, rules: restrict what is tried; empty is everything.
    """
    subject = Subject.of(implementation, plan, pool)
    provided = subject.implementation.provided
    results = Results.of(subject.implementation, plan, operations, rules)
    try:
        trials = planned(checks(), plan, provided, operations=operations, rules=rules)
        run_planned(subject, trials, results)
    finally:
        if pool is None:
            subject.close()
    return results
