"""OWN: which rank owns which tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moetail.conformance.run.call import CallSpec
from moetail.conformance.run.check import Phase, checks_rule
from moetail.conformance.run.plan import Plan
from moetail.conformance.run.subject import Subject
from moetail.conformance.run.trial import NotJudged, Trial
from moetail.conformance.run.workspaces import FIELDS
from moetail.conformance.suite.draws import draw, trials
from moetail.spec.rules import ALLREDUCE, GATHER, WORKSPACE

_STRATEGIES = ("oneshot", "twoshot", "unfused")


def _even(plan: Plan, name: str) -> Iterator[Trial]:
    for ranks in plan.group_sizes(name):
        for strategy in _STRATEGIES if plan.profile != "quick" else ("oneshot", "twoshot"):
            fixed = {"tokens": 2 * ranks, "strategy": strategy, "top_k": 2, "hidden": 256}
            yield from trials(
                draw(plan, name, ("even", strategy), 1, "grid", fixed=fixed, ranks=(ranks,))
            )


@checks_rule("OWN-1", _even, believed=(Phase.INVARIANCE, 80))
def test_own_1_consecutive_blocks_without_padding(subject: Subject, trial: Trial) -> None:
    subject.conforms(*subject.run(CallSpec(trial.case)))


def _uneven(plan: Plan, name: str) -> Iterator[Trial]:
    for ranks in plan.group_sizes(name):
        # T that W does not divide, that leaves a rank without tokens, and fewer tokens than ranks.
        for tokens in sorted({1, ranks + 1, max(1, 2 * ranks - 1), 3 * ranks + 1}):
            for strategy in _STRATEGIES if plan.profile != "quick" else ("oneshot", "twoshot"):
                fixed = {"tokens": tokens, "strategy": strategy, "top_k": 2, "hidden": 256}
                yield from trials(
                    draw(plan, name, (tokens, strategy), 1, "grid", fixed=fixed, ranks=(ranks,))
                )


@checks_rule("OWN-1", _uneven, believed=(Phase.INVARIANCE, 100))
def test_own_1_consecutive_blocks(subject: Subject, trial: Trial) -> None:
    subject.conforms(*subject.run(CallSpec(trial.case)))


def _padded_pair(plan: Plan, name: str) -> Iterator[Trial]:
    # On two ranks, blocks of ceil(T / W) are also the evenest: who reads padding here gathers it.
    yield from (trial for trial in _padded(plan, name) if trial.case.ranks <= 2)


def _padded_more(plan: Plan, name: str) -> Iterator[Trial]:
    yield from (trial for trial in _padded(plan, name) if trial.case.ranks > 2)


def _padded(plan: Plan, name: str) -> Iterator[Trial]:
    for ranks in plan.group_sizes(name):
        for strategy in _STRATEGIES:
            fixed = {"tokens": ranks + 1, "capacity": 3, "strategy": strategy, "poison": "nan"}
            yield from trials(draw(plan, name, strategy, 1, free=True, fixed=fixed, ranks=(ranks,)))


@checks_rule("OWN-2", _padded_pair, believed=(Phase.INVARIANCE, 90))
def test_own_2_padding_contributes_nothing_on_two_ranks(subject: Subject, trial: Trial) -> None:
    _same_whatever_padding_holds(subject, trial)


@checks_rule("OWN-2", _padded_more, believed=(Phase.INVARIANCE, 110))
def test_own_2_padding_contributes_nothing(subject: Subject, trial: Trial) -> None:
    _same_whatever_padding_holds(subject, trial)


def _same_whatever_padding_holds(subject: Subject, trial: Trial) -> None:
    case = trial.case
    first, finite, tight = subject.run(
        CallSpec(case), CallSpec(case.replace(poison="random")), CallSpec(case.replace(capacity=0))
    )
    subject.same(finite, first, "NaN in padding or capacity slots changed the result")
    subject.same(finite, tight, "capacity slots changed the result")


def _several_ranks(plan: Plan, name: str) -> Iterator[Trial]:
    several = [ranks for ranks in plan.group_sizes(name) if ranks > 1]
    strategies = _STRATEGIES if name == GATHER else (None,)
    for strategy in strategies:
        fixed = {"strategy": strategy} if strategy else {}
        yield from trials(
            draw(
                plan,
                name,
                ("replicas", strategy),
                plan.pick(1, 4),
                "wide" if name != GATHER else "normal",
                free=True,
                fixed=fixed,
                ranks=several,
            )
        )


def _orders_that_show(plan: Plan, name: str) -> Iterator[Trial]:
    yield from _several_ranks(plan, name)
    if name == GATHER:
        several = [ranks for ranks in plan.group_sizes(name) if ranks > 1]
        fixed: dict[str, Any] = {"top_k": 8, "hidden": 512}
        cases = draw(plan, name, "order", plan.pick(1, 3), "cancel", fixed=fixed, ranks=several)
        yield from trials(cases)
    if name == ALLREDUCE:
        more = [ranks for ranks in plan.group_sizes(name) if ranks > 2]
        fixed = {"routed": "finalized", "tokens": 4}
        for case in draw(plan, name, "order", plan.pick(1, 3), fixed=fixed, ranks=more):
            yield Trial(name, case, "cancelling-ranks")


@checks_rule("OWN-3", _orders_that_show, varies=None, believed=(Phase.INVARIANCE, 130))
def test_own_3_replicas_are_bit_identical(subject: Subject, trial: Trial) -> None:
    (run,) = subject.run(CallSpec(trial.case, trial.variation))
    subject.returned(run)
    for rank, value in enumerate(run.values[1:], start=1):
        subject.same_values(run.values[0], value, f"ranks 0 and {rank} differ", run)


def _strategies(plan: Plan, name: str) -> Iterator[Trial]:
    for ranks in plan.group_sizes(name):
        for strategy in (*_STRATEGIES, None):
            fixed: dict[str, Any] = {"strategy": strategy, "post": "affine", "next": "affine"}
            for scales in (None, (0.7, 1.3)):
                here = {**fixed, "routed_scale": 2.5, "scales": scales}
                count = plan.pick(1, 3)
                yield from trials(
                    draw(plan, name, (strategy, scales), count, fixed=here, ranks=(ranks,))
                )


@checks_rule("OWN-4", _strategies, operations=(GATHER,), believed=(Phase.VALUE, 170))
def test_own_4_every_strategy_conforms(subject: Subject, trial: Trial) -> None:
    subject.conforms(*subject.run(CallSpec(trial.case)))


def _thresholds(plan: Plan, name: str) -> Iterator[Trial]:
    for ranks in plan.group_sizes(name):
        fixed = {"tokens": 5, "strategy": None}
        yield from trials(draw(plan, name, "threshold", 1, fixed=fixed, ranks=(ranks,)))


@checks_rule("OWN-4", _thresholds, operations=(GATHER,), believed=(Phase.VALUE, 160))
def test_own_4_the_default_follows_the_thresholds(subject: Subject, trial: Trial) -> None:
    """What can be observed of the choice: only "unfused" goes through the workspace's hook."""
    case = trial.case
    tokens = case.tokens
    expected = {
        (tokens, None): False,  # oneshot up to the first threshold, that T included
        (tokens - 1, None): False,  # twoshot, as there is no second threshold
        (tokens - 1, tokens): True,  # unfused from the second threshold on
        (tokens - 1, tokens + 1): False,  # twoshot between the two
        (tokens, 1): False,  # oneshot comes first where both hold
    }
    runs = subject.run(*(CallSpec(case, thresholds=pair) for pair in expected))
    for run, ((oneshot, separate), through_hook) in zip(runs, expected.items(), strict=True):
        subject.conforms(run)
        for outcome in run.outcomes:
            if through_hook and outcome.hook_calls == 0 and not _has_hook(subject):
                raise NotJudged("the workspace has no all_gather hook to observe")
            subject.require(
                (outcome.hook_calls > 0) == through_hook,
                f"T = {tokens}, oneshot_max_tokens = {oneshot}, separate_norm_min_tokens = "
                f"{separate}: all_gather was called {outcome.hook_calls} times; "
                + ("unfused calls it" if through_hook else "only unfused calls it"),
                run,
            )


def _groups(plan: Plan, name: str) -> Iterator[Trial]:
    for ranks in plan.group_sizes(name):
        (case,) = draw(plan, GATHER, "workspace", 1, fixed={"tokens": 4}, ranks=(ranks,))
        yield Trial(name, case)


@checks_rule("OWN-4", _groups, operations=(WORKSPACE,), believed=(Phase.RUN, 130))
def test_own_4_a_workspace_has_its_fields(subject: Subject, trial: Trial) -> None:
    case = trial.case
    for rank, found in enumerate(subject.workspaces(case.ranks, case.hidden, 33, "bfloat16")):
        if found.get("none"):
            raise NotJudged(f"create returned None on this machine, for {case.ranks} ranks")
        expected = {
            "world_size": case.ranks,
            "rank": rank,
            "hidden_size": case.hidden,
            "max_tokens": 33,
        }
        for name, value in expected.items():
            shown = found.get(name, "not there")
            subject.require(shown == value, f"rank {rank}: {name} is {shown}; it is {value}")
        for name in FIELDS:
            subject.require(name in found, f"rank {rank}: the workspace has no {name}")
        oneshot = found["moe_gather_oneshot_max_tokens"]
        subject.require(
            isinstance(oneshot, int),
            f"rank {rank}: moe_gather_oneshot_max_tokens is {oneshot!r}, not a number of tokens",
        )


def _has_hook(subject: Subject) -> bool:
    return subject.implementation.provides("BeamAllReduceWorkspace")
