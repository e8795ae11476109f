"""LIVE: which slots are alive."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from moetail.conformance.cases.tensors import tensors_in
from moetail.conformance.run.call import CallSpec
from moetail.conformance.run.check import Phase, checks_rule
from moetail.conformance.run.plan import Plan
from moetail.conformance.run.subject import Subject
from moetail.conformance.run.trial import Trial
from moetail.conformance.suite.draws import draw, trials
from moetail.spec.rules import BOUNDARY, FINALIZE, FUSED, GATHER, MOE_OUTPUT


def _capacity(plan: Plan, name: str) -> Iterator[Trial]:
    # As many tokens as fill every rank: what the last ranks own too little of is OWN-2's.
    for ranks in plan.group_sizes(name):
        fixed: dict[str, Any] = {"capacity": 5, "poison": "nan", "tokens": 3 * ranks}
        count = plan.pick(1, 6)
        yield from trials(
            draw(plan, name, "capacity", count, free=True, fixed=fixed, ranks=(ranks,))
        )


@checks_rule("LIVE-1", _capacity, operations=(FINALIZE, FUSED), believed=(Phase.INVARIANCE, 10))
def test_live_1_only_live_slots_are_read(subject: Subject, trial: Trial) -> None:
    _same_whatever_capacity_holds(subject, trial)


@checks_rule("LIVE-1", _capacity, operations=(GATHER,), believed=(Phase.INVARIANCE, 120))
def test_live_1_only_live_slots_are_gathered(subject: Subject, trial: Trial) -> None:
    _same_whatever_capacity_holds(subject, trial)


def _same_whatever_capacity_holds(subject: Subject, trial: Trial) -> None:
    case = trial.case
    first, finite, tight = subject.run(
        CallSpec(case), CallSpec(case.replace(poison="random")), CallSpec(case.replace(capacity=0))
    )
    subject.same(finite, first, "NaN in slots that are not live changed the result")
    subject.same(finite, tight, "slots that are not live changed the result")


def _no_tokens(plan: Plan, name: str) -> Iterator[Trial]:
    with_norm = {} if name in (FINALIZE, MOE_OUTPUT) else {"next": "affine"}
    without = {} if name in (FINALIZE, MOE_OUTPUT) else {"next": "none"}
    for fixed in (with_norm, without):
        here = {"tokens": 0, **fixed}
        cases = draw(plan, name, ("none", *fixed.values()), plan.pick(1, 3), free=True, fixed=here)
        yield from trials(cases)


@checks_rule("LIVE-2", _no_tokens, believed=(Phase.RUN, 10))
def test_live_2_zero_tokens_give_empty_outputs(subject: Subject, trial: Trial) -> None:
    case = trial.case
    (run,) = subject.run(CallSpec(case))
    subject.returned(run)
    for value in run.values:
        if case.operation in (FINALIZE, MOE_OUTPUT):
            outputs = {"output": value}
        else:
            subject.require(
                isinstance(value, (tuple, list)) and len(value) == 2,
                f"returned {type(value).__name__}, not (hidden, normalized)",
                run,
            )
            outputs = {"hidden": value[0], "normalized": value[1]}
            if case.next == "none":
                subject.require(
                    outputs.pop("normalized") is None, "normalized is not None without next_eps"
                )
        for name, output in outputs.items():
            subject.require(isinstance(output, torch.Tensor), f"{name} is {output!r}, not a tensor")
            found = f"{list(output.shape)} {output.dtype}"
            subject.require(
                tuple(output.shape) == (0, case.hidden) and output.dtype is torch.bfloat16,
                f"{name} is {found}, not [0, {case.hidden}] torch.bfloat16",
                run,
            )
    if subject.plan.device == "cuda" and case.ranks == 1 and case.operation != BOUNDARY:
        subject.require(_launches(subject, trial) == 0, "launched a kernel for zero tokens", run)


def _launches(subject: Subject, trial: Trial) -> int:
    """Kernels that a second call launches, as the profiler sees them."""
    from torch.profiler import ProfilerActivity, profile

    if trial.case.operation not in (FINALIZE, MOE_OUTPUT):
        return 0
    arguments = trial.case.arguments(device="cuda")
    function = subject.implementation.get(trial.operation)
    assert any(True for _ in tensors_in(arguments))
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        function(**arguments)
        torch.cuda.synchronize()
    return sum(event.device_type.name == "CUDA" for event in recorded.events())
