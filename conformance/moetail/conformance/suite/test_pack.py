"""PACK: how rows are packed."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moetail.conformance.run.call import CallSpec
from moetail.conformance.run.check import Phase, checks_rule
from moetail.conformance.run.plan import Plan
from moetail.conformance.run.subject import Subject
from moetail.conformance.run.trial import Trial
from moetail.conformance.suite.draws import draw, trials
from moetail.conformance.suite.refusing import must_refuse, refusal_trials
from moetail.spec.rules import ALLREDUCE, MOE_OUTPUT, ROUTE_MAJOR


@checks_rule("PACK-1", refusal_trials("PACK-1"), varies=True, believed=(Phase.REFUSAL, 30))
def test_pack_1_refuses_rows_that_are_not_dense(subject: Subject, trial: Trial) -> None:
    if trial.operation == ROUTE_MAJOR:
        function = subject.implementation.get(ROUTE_MAJOR)
        arguments = trial.case.arguments(device=subject.plan.device)
        routes = arguments["routes"]
        wide = torch.cat([routes, routes], dim=-1)
        arguments["routes"] = wide[..., : routes.shape[-1]]
        try:
            function(**arguments)
        except Exception:
            subject.require(True, "")
            return
        subject.require(False, "took rows that are not contiguous")
    must_refuse(subject, trial)


def _wrappings(plan: Plan, name: str) -> Iterator[Trial]:
    fixed = {"layout": "permuted", "tokens": 6}
    # Sums that cancel show in which order they were taken.
    free = {**fixed, "local": 0.5, "top_k": 4}
    cancelling = {**fixed, "top_k": 8, "hidden": 512}
    for source, here in (("normal", free), ("cancel", cancelling)):
        cases = draw(
            plan, name, "pad", plan.pick(1, 4), source, free=source == "normal", fixed=here
        )
        yield from trials(cases, "more-rows")


@checks_rule("PACK-2", _wrappings, varies=True, believed=(Phase.INVARIANCE, 40))
def test_pack_2_padding_changes_no_bit(subject: Subject, trial: Trial) -> None:
    case = trial.case
    poisons = [poison for poison in ("nan", "inf", "huge", "random") if poison != case.poison]
    first, more, wider, *others = subject.run(
        CallSpec(case),
        CallSpec(case, trial.variation),
        CallSpec(case.replace(tile=32 if case.tile != 32 else 16)),
        *(CallSpec(case.replace(poison=poison)) for poison in poisons),
    )
    subject.same(first, more, "137 more padding rows changed the result")
    subject.same(first, wider, "a wider tile changed the result")
    for poison, run in zip(poisons, others, strict=True):
        subject.same(
            first, run, f"{poison} instead of {case.poison} in unreferenced rows changed it"
        )


def _route_major(plan: Plan, name: str) -> Iterator[Trial]:
    count = plan.pick(2, 8)
    fixed = {"layout": "route_major", "top_k": 4, "tokens": 5, "local": 0.5}
    if name in (MOE_OUTPUT, ALLREDUCE):
        fixed |= {"weights": "fp32"}
    yield from trials(draw(plan, name, "route-major", count, "grid", fixed=fixed))


@checks_rule("PACK-3", _route_major, operations=(ROUTE_MAJOR,), believed=(Phase.CONVERSION, 20))
def test_pack_3_route_major_map(subject: Subject, trial: Trial) -> None:
    arguments = trial.case.arguments(device=subject.plan.device)
    made = subject.converted(arguments)
    ids, expert_map = arguments["topk_ids"].long(), arguments["expert_map"]
    index = made.expanded_idx_to_permuted_idx
    subject.require(index.dtype == torch.int32, f"the map is {index.dtype}, not torch.int32")
    subject.require(
        tuple(index.shape) == tuple(ids.shape), f"the map has shape {list(index.shape)}"
    )
    rows = made.gemm2_permuted
    subject.require(
        rows.dim() == 2 and rows.shape[0] == ids.numel(),
        f"rows have shape {list(rows.shape)}; there are T * K = {ids.numel()} rows on every rank",
    )
    subject.require(made.route_major is True, f"route_major is {made.route_major!r}")
    for token in range(ids.shape[0]):
        for slot in range(ids.shape[1]):
            local = expert_map is None or int(expert_map[ids[token, slot]]) >= 0
            expected = token * ids.shape[1] + slot if local else -1
            found = int(index[token, slot])
            subject.require(found == expected, f"map[{token}, {slot}] = {found}; it is {expected}")


@checks_rule("PACK-3", _route_major, operations=(MOE_OUTPUT, ALLREDUCE), believed=(Phase.VALUE, 50))
def test_pack_3_route_major_is_the_identity(subject: Subject, trial: Trial) -> None:
    subject.conforms(*subject.run(CallSpec(trial.case)))
