"""ROUND: where values are rounded.

Each rule has its own sources of values, on which it decides and the other rules do not.
"""

from __future__ import annotations

from collections.abc import Iterator

from moetail.conformance.run.call import CallSpec
from moetail.conformance.run.check import Phase, checks_rule
from moetail.conformance.run.plan import Plan
from moetail.conformance.run.subject import Subject
from moetail.conformance.run.trial import Trial
from moetail.conformance.suite.draws import aimed, draw, trials
from moetail.spec.rules import ALLREDUCE, FINALIZE, MOE_OUTPUT


@checks_rule("ROUND-1", aimed("accumulate"), believed=(Phase.VALUE, 60))
def test_round_1_the_reduction_accumulates_in_fp32(subject: Subject, trial: Trial) -> None:
    subject.conforms(*subject.run(CallSpec(trial.case)))


@checks_rule("ROUND-2", aimed("scale", "scale-round", "scale-double"), believed=(Phase.VALUE, 100))
def test_round_2_rounded_before_the_scale_and_after(subject: Subject, trial: Trial) -> None:
    subject.conforms(*subject.run(CallSpec(trial.case)))


_TIES = aimed("ties", "ties-down", "ties-up", "ties-near")


def _ties(plan: Plan, name: str) -> Iterator[Trial]:
    yield from (trial for trial in _TIES(plan, name) if not trial.case.shared)


def _ties_of_shared_sums(plan: Plan, name: str) -> Iterator[Trial]:
    # A shared part that is left out is ROUND-7's.
    yield from (trial for trial in _TIES(plan, name) if trial.case.shared)


@checks_rule("ROUND-3", _ties, believed=(Phase.VALUE, 70))
def test_round_3_to_nearest_ties_to_even(subject: Subject, trial: Trial) -> None:
    subject.conforms(*subject.run(CallSpec(trial.case)))


@checks_rule(
    "ROUND-3", _ties_of_shared_sums, operations=(MOE_OUTPUT, ALLREDUCE), believed=(Phase.VALUE, 120)
)
def test_round_3_of_sums_with_the_shared_part(subject: Subject, trial: Trial) -> None:
    subject.conforms(*subject.run(CallSpec(trial.case)))


@checks_rule(
    "ROUND-4",
    aimed("norm-affine", "norm-eps", "norm-mean", "norm-outlier", "norm-prenorm"),
    believed=(Phase.VALUE, 90),
)
def test_round_4_norms_are_fp32_on_the_rounded_input(subject: Subject, trial: Trial) -> None:
    subject.conforms(*subject.run(CallSpec(trial.case)))


def _wide(plan: Plan, name: str) -> Iterator[Trial]:
    fixed = {"post": "affine"} if name == FINALIZE else {"post": "affine", "next": "affine"}
    yield from trials(draw(plan, name, "wide", plan.pick(1, 3), "wide", fixed=fixed))


@checks_rule("ROUND-4", _wide, believed=(Phase.VALUE, 150))
def test_round_4_norm_weights_of_any_size(subject: Subject, trial: Trial) -> None:
    """Weights from 2^-30 to 2^30: FP16 holds few of them."""
    subject.conforms(*subject.run(CallSpec(trial.case)))


@checks_rule("ROUND-5", aimed("residual", "residual-double"), believed=(Phase.VALUE, 130))
def test_round_5_each_residual_product_is_rounded(subject: Subject, trial: Trial) -> None:
    subject.conforms(*subject.run(CallSpec(trial.case)))


@checks_rule("ROUND-6", aimed("hidden"), believed=(Phase.VALUE, 140))
def test_round_6_the_next_norm_takes_the_rounded_hidden(subject: Subject, trial: Trial) -> None:
    subject.conforms(*subject.run(CallSpec(trial.case)))


@checks_rule("ROUND-7", aimed("shared", "allreduce"), believed=(Phase.VALUE, 110))
def test_round_7_shared_after_the_scale_and_ranks_before_the_norm(
    subject: Subject, trial: Trial
) -> None:
    subject.conforms(*subject.run(CallSpec(trial.case)))
