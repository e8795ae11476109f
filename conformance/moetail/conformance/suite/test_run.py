"""RUN: how an implementation behaves when it runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from moetail.conformance.cases.tensors import tensors_in
from moetail.conformance.run.call import (
    GRAPH,
    STREAM,
    CallResult,
    CallSpec,
    outputs,
    same_bits,
)
from moetail.conformance.run.check import Phase, checks_rule
from moetail.conformance.run.plan import Plan
from moetail.conformance.run.ranks import RankError
from moetail.conformance.run.subject import Subject
from moetail.conformance.run.trial import NotJudged, Run, Trial
from moetail.conformance.suite.draws import draw, general, trials
from moetail.spec import rule
from moetail.spec.rules import (
    ALLREDUCE,
    BOUNDARY,
    CONVERT,
    FINALIZE,
    FUSED,
    GATHER,
    MOE_OUTPUT,
    ROUTE_MAJOR,
)

_CONVERSIONS = (CONVERT, ROUTE_MAJOR)


def _repeated(plan: Plan, name: str) -> Iterator[Trial]:
    yield from general("normal", quick=1, full=3)(plan, name)
    # Sums that cancel show in which order they were taken.
    top_k = 1 if name == BOUNDARY else 8
    fixed: dict[str, Any] = {"tokens": 6, "top_k": top_k, "hidden": 512}
    if name in (BOUNDARY, FUSED, GATHER, ALLREDUCE):
        fixed["next"] = "affine"
    yield from trials(draw(plan, name, "repeat", plan.pick(1, 3), "cancel", fixed=fixed))


@checks_rule("RUN-1", _repeated, believed=(Phase.RUN, 50))
def test_run_1_the_same_bits_run_after_run(subject: Subject, trial: Trial) -> None:
    first, *others = subject.run(*[CallSpec(trial.case)] * 4)
    for run in others:
        subject.same(first, run, "the same inputs gave other bits")


def _everything_given(plan: Plan, name: str) -> Iterator[Trial]:
    """Every optional tensor is there, so that each could be written to."""
    fixed: dict[str, Any] = {}
    if name in (MOE_OUTPUT, ALLREDUCE):
        fixed |= {"shared": True, "local": 0.5, "routed_scale": 2.5}
    if name in (FINALIZE, BOUNDARY, FUSED, GATHER, ALLREDUCE):
        fixed |= {"post": "affine"}
    if name in (BOUNDARY, FUSED, GATHER, ALLREDUCE):
        fixed |= {"next": "affine", "scales": (0.7, 1.3)}
    yield from trials(draw(plan, name, "given", plan.pick(1, 3), fixed=fixed))
    if name in (MOE_OUTPUT, ALLREDUCE):
        # NaN where nothing may be read tempts to clean it up.
        holes = {"local": 0.5, "tokens": 6, "top_k": 4}
        yield from trials(draw(plan, name, "holes", 1, "routes", fixed=holes))


@checks_rule("RUN-2", _everything_given, believed=(Phase.RUN, 60))
def test_run_2_inputs_are_not_modified(subject: Subject, trial: Trial) -> None:
    if trial.operation in _CONVERSIONS:
        arguments = trial.case.arguments(device=subject.plan.device)
        before = {name: tensor.clone() for name, tensor in tensors_in(arguments)}
        subject.converted(arguments)
        for name, tensor in tensors_in(arguments):
            subject.require(same_bits(tensor, before[name]), f"modified its input {name}")
        return
    (run,) = subject.run(CallSpec(trial.case))
    subject.returned(run)
    for rank, outcome in enumerate(run.outcomes):
        where = f" on rank {rank}" if rank else ""
        subject.require(
            not outcome.changed, f"modified its input {', '.join(outcome.changed)}{where}", run
        )


def _walled(plan: Plan, name: str) -> Iterator[Trial]:
    yield from trials(draw(plan, name, "walls", plan.pick(1, 4), "grid"))


@checks_rule("RUN-2", _walled, operations=rule("RUN-1").operations, believed=(Phase.RUN, 70))
def test_run_2_nothing_around_the_tensors_is_touched(subject: Subject, trial: Trial) -> None:
    """Every tensor lies between stretches of NaN: who writes there or reads there shows."""
    (plain, walled) = subject.run(CallSpec(trial.case), CallSpec(trial.case, guard=True))
    subject.same(plain, walled, "with NaN around every tensor, other bits")
    for rank, outcome in enumerate(walled.outcomes):
        where = f" on rank {rank}" if rank else ""
        subject.require(
            not outcome.changed, f"modified {', '.join(outcome.changed)}{where}", walled
        )


def _plain(plan: Plan, name: str) -> Iterator[Trial]:
    # What may not be read is no NaN here, so that every NaN in a result was there before.
    fixed: dict[str, Any] = {} if name == BOUNDARY else {"poison": "random"}
    for ranks in plan.group_sizes(name):
        here = dict(fixed)
        if name == ALLREDUCE and ranks > 1:
            # Sharded experts leave tokens without a local route: those are ROUTE-4's.
            here = {"routed": "finalized"}
        count = plan.pick(2, 6)
        yield from trials(draw(plan, name, "written", count, "grid", fixed=here, ranks=(ranks,)))


@checks_rule("RUN-3", _plain, believed=(Phase.RUN, 20))
def test_run_3_every_element_is_written(subject: Subject, trial: Trial) -> None:
    """Destinations and fresh memory hold NaN before, and on these values no result is NaN."""
    case = trial.case
    (run,) = subject.run(CallSpec(case, fill=True))
    subject.returned(run)
    for rank, outcome in enumerate(run.outcomes):
        where = f"rank {rank}: " if rank else ""
        subject.require(
            outcome.destination, f"{where}returned a tensor other than the given output", run
        )
        for name, output in outputs(outcome.value).items():
            subject.tally.judged += output.numel()
            unwritten = output.isnan()
            if bool(unwritten.any()):
                index = [int(i) for i in unwritten.nonzero()[0]]
                raise subject.violation(
                    f"{where}{name}{index} is not written: it holds the NaN that was "
                    f"there before ({int(unwritten.sum())} of {output.numel()} elements)",
                    runs=[run],
                )


def _replays(plan: Plan, name: str) -> Iterator[Trial]:
    fixed = {"layout": "route_major"} if name in (MOE_OUTPUT, ALLREDUCE) else {}
    count = plan.pick(1, 4)
    yield from trials(draw(plan, name, "replay", count, "grid", fixed={**fixed, "tokens": 5}))


@checks_rule("RUN-4", _replays, believed=(Phase.RUN, 80))
def test_run_4_changed_inputs_in_the_same_buffers(subject: Subject, trial: Trial) -> None:
    """What a replayed graph does, eagerly: new values at the addresses of the call before."""
    case = trial.case
    other = case.replace(seed=case.seed + 1)
    first, second, again = subject.run(
        CallSpec(case), CallSpec(other, reuse=True), CallSpec(case, reuse=True)
    )
    (fresh,) = subject.run(CallSpec(other))
    subject.same(second, fresh, "with new values in the buffers of the call before, other bits")
    subject.same(first, again, "with the first values back in the same buffers, other bits")


def _on_gpu(plan: Plan, name: str) -> Iterator[Trial]:
    if plan.device != "cuda":
        return
    # Nothing whose shape is drawn from the seed, as two seeds share their tensors here.
    fixed: dict[str, Any] = {"capacity": 0}
    if name in (MOE_OUTPUT, ALLREDUCE):
        fixed = {"layout": "route_major"}
    elif name == BOUNDARY:
        fixed = {}
    for tokens in (1, 5, 300):
        here = {**fixed, "tokens": tokens}
        yield from trials(draw(plan, name, ("gpu", tokens), plan.pick(1, 3), free=True, fixed=here))


@checks_rule("RUN-4", _on_gpu, believed=(Phase.RUN, 90))
def test_run_4_on_the_current_stream(subject: Subject, trial: Trial) -> None:
    eager, streamed = subject.run(
        CallSpec(trial.case), CallSpec(trial.case, mode=STREAM, snapshot=False)
    )
    subject.same(eager, streamed, "on another stream, other bits: it does not run there")


@checks_rule("RUN-4", _on_gpu, believed=(Phase.RUN, 100))
def test_run_4_a_replayed_graph_equals_eager(subject: Subject, trial: Trial) -> None:
    eager, replayed = subject.run(
        CallSpec(trial.case), CallSpec(trial.case, mode=GRAPH, snapshot=False)
    )
    subject.same(eager, replayed, "a graph captured on other values and replayed gave other bits")


def _sequences(plan: Plan, name: str) -> Iterator[Trial]:
    for ranks in plan.group_sizes(name):
        for number in range(plan.pick(1, 3)):
            yield from trials(
                draw(
                    plan, name, ("sequence", number), 1, "grid", fixed={"tokens": 9}, ranks=(ranks,)
                )
            )


@checks_rule("RUN-5", _sequences, believed=(Phase.RUN, 110))
def test_run_5_one_workspace_serves_any_sequence(subject: Subject, trial: Trial) -> None:
    """Each call of a sequence on one workspace equals the same call on a fresh one."""
    case = trial.case
    rng = subject.plan.random("sequence", trial.id)
    sizes = [9, 1, 0, 9, 2 * case.ranks + 1, 0, case.ranks, 9]
    if case.operation == GATHER:
        kinds = [{"strategy": rng.choice(("oneshot", "twoshot", "unfused", None))} for _ in sizes]
    else:
        kinds = [{} for _ in sizes]
    cases = [
        case.replace(tokens=size, seed=case.seed + number, **kind)
        for number, (size, kind) in enumerate(zip(sizes, kinds, strict=True))
    ]
    most = max(sizes)
    sequence = subject.run(*(CallSpec(each, max_tokens=most) for each in cases))
    for each, run in zip(cases, sequence, strict=True):
        if each.tokens:
            (alone,) = subject.run(CallSpec(each, max_tokens=most))
            what = f"T = {each.tokens} after other sizes on the same workspace gave other bits"
            subject.same(run, alone, what)


def _many_tokens(plan: Plan, name: str) -> Iterator[Trial]:
    if name not in (FINALIZE, BOUNDARY, FUSED):
        return
    norms = {"post": "affine"} if name == FINALIZE else {"post": "affine", "next": "affine"}
    fixed = {"tokens": 3, "top_k": 1, "hidden": 8192, **norms}
    yield from trials(draw(plan, name, "many", 1, fixed=fixed), "repeated-past-int32")


@checks_rule("RUN-6", _many_tokens, varies=True, believed=(Phase.INVARIANCE, 70))
def test_run_6_tokens_past_two_to_the_31_elements(subject: Subject, trial: Trial) -> None:
    """The case's tokens over and over; its last repetition is judged."""
    if subject.plan.device != "cuda":
        raise NotJudged("needs a GPU: all of 2^31 elements are read and written")
    try:
        (run,) = subject.run(CallSpec(trial.case, trial.variation, snapshot=False))
    except torch.OutOfMemoryError as error:
        raise NotJudged(f"no memory for 2^31 elements: {error}") from None
    if any(outcome.no_memory for outcome in run.outcomes):
        raise NotJudged("no memory for 2^31 elements")
    subject.returned(run)
    last = [_last_tokens(value, trial.case.tokens) for value in run.values]
    calls = [trial.case.arguments(device=subject.plan.device)]
    subject.conforms_values(Run(CallSpec(trial.case), [CallResult(value) for value in last]), calls)


def _last_tokens(value: Any, tokens: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[-tokens:]
    return tuple(None if item is None else item[-tokens:] for item in value)


def _far(plan: Plan, name: str) -> Iterator[Trial]:
    several = [ranks for ranks in plan.group_sizes(name) if ranks <= 2][:1]
    fixed = {"layout": "permuted", "tokens": 3, "top_k": 2, "hidden": 4096}
    for case in draw(plan, name, "far", 1, "grid", fixed=fixed, ranks=several):
        yield Trial(name, case, "past-int32")


@checks_rule(
    "RUN-6", _far, operations=(MOE_OUTPUT, ALLREDUCE), varies=True, believed=(Phase.INVARIANCE, 60)
)
def test_run_6_offsets_past_two_to_the_31(subject: Subject, trial: Trial) -> None:
    try:
        near, far = subject.run(
            CallSpec(trial.case), CallSpec(trial.case, trial.variation, snapshot=False)
        )
    except MemoryError as error:
        raise NotJudged(f"no memory for a buffer past 2^31 elements: {error}") from None
    if any(outcome.no_memory for outcome in far.outcomes):
        raise NotJudged("no memory for a buffer past 2^31 elements")
    subject.same(near, far, "rows past 2^31 elements gave other bits")


def _zeros(plan: Plan, name: str) -> Iterator[Trial]:
    strategies = ("oneshot", "twoshot", "unfused") if name == GATHER else (None,)
    for strategy in strategies:
        fixed = {"strategy": strategy} if strategy else {}
        yield from trials(
            draw(plan, name, ("zeros", strategy), plan.pick(1, 3), "zeros", fixed=fixed)
        )


@checks_rule("RUN-7", _zeros, believed=(Phase.RUN, 40))
def test_run_7_negative_zeros_do_not_hang(subject: Subject, trial: Trial) -> None:
    """A call without them returns, so one with them does; what it returns is judged later."""
    try:
        (plain,) = subject.run(CallSpec(trial.case.replace(source="grid")))
    except RankError as error:
        raise NotJudged(f"hangs without negative zeros, too: {error}") from None
    if any(outcome.refusal for outcome in plain.outcomes):
        raise NotJudged("raises without negative zeros, too")
    (zeros,) = subject.run(CallSpec(trial.case))
    subject.returned(zeros)
    subject.require(not zeros.refused, "raised", zeros)


@checks_rule("RUN-7", _zeros, believed=(Phase.VALUE, 180))
def test_run_7_negative_zeros_in_the_payload(subject: Subject, trial: Trial) -> None:
    subject.conforms(*subject.run(CallSpec(trial.case)))
