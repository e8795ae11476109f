"""CONVERT: what a producer's return value may look like."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from moetail.conformance.run.call import same_bits
from moetail.conformance.run.check import Phase, checks_rule
from moetail.conformance.run.plan import Plan
from moetail.conformance.run.subject import Subject
from moetail.conformance.run.trial import Trial
from moetail.conformance.suite.draws import draw, trials
from moetail.spec.rules import CONVERT, ROUTE_MAJOR

# Every legal layout of the two operations.
_LAYOUTS: dict[str, tuple[dict[str, Any], ...]] = {
    CONVERT: (
        {"local": 0.5},
        {"local": 0.5, "flat": True},
        {"weights": "bf16"},
        {"weights": "bf16", "flat": True},
        {"layout": "route_major"},
        {"tokens": 0},
        {"tokens": 0, "flat": True},
        {"routed": "finalized"},
        {"routed": "finalized", "flat": True},
        {"routed": "finalized", "aliased": True},
        {"routed": "finalized", "aliased": True, "flat": True},
        {"routed": "finalized", "tokens": 0},
    ),
    ROUTE_MAJOR: (
        {},
        {"flat": True},
        {"local": 0.5},
        {"local": 0.5, "flat": True},
        {"weights": "bf16"},
        {"tokens": 0},
        {"tokens": 0, "flat": True},
    ),
}


def _legal(plan: Plan, name: str) -> Iterator[Trial]:
    for number, layout in enumerate(_LAYOUTS[name]):
        # More than one token and route, so that a flat map differs from a matrix.
        fixed = {"tokens": 4, "top_k": 3, **layout}
        yield from trials(draw(plan, name, ("legal", number), plan.pick(1, 4), fixed=fixed))


def _call(subject: Subject, trial: Trial, arguments: dict[str, Any]) -> Any:
    try:
        return subject.implementation.get(trial.operation)(**arguments)
    except Exception as error:
        raise subject.violation(
            f"raised on a legal layout: {type(error).__name__}: {error}"
        ) from error


@checks_rule("CONVERT-1", _legal, believed=(Phase.CONVERSION, 30))
def test_convert_1_legal_layouts_are_accepted(subject: Subject, trial: Trial) -> None:
    case = trial.case
    arguments = case.arguments(device=subject.plan.device)
    made = _call(subject, trial, arguments)
    if case.routed == "finalized":
        given = arguments["flashinfer_output"]
        given = given[0] if isinstance(given, list) else given
        subject.require(
            isinstance(made, torch.Tensor) and same_bits(made, given),
            "did not return the finalized tensor",
        )
        return
    shape = (case.tokens, case.top_k)
    if trial.operation == CONVERT:
        rows, weights, index = arguments["flashinfer_output"]
    else:
        rows, weights = arguments["routes"].view(-1, case.hidden), arguments["topk_weights"]
        index = None
    for name, found, expected in (
        ("gemm2_permuted", made.gemm2_permuted, rows),
        ("expert_weights", made.expert_weights, weights.view(shape)),
        (
            "expanded_idx_to_permuted_idx",
            made.expanded_idx_to_permuted_idx,
            None if index is None else index.view(shape),
        ),
    ):
        if expected is None:
            subject.require(tuple(found.shape) == shape, f"{name} has shape {list(found.shape)}")
            continue
        subject.require(
            found.shape == expected.shape and same_bits(found, expected),
            f"{name} is {list(found.shape)} {found.dtype}, not what the producer returned "
            f"as {list(expected.shape)} {expected.dtype}",
        )


Spoil = Callable[[dict[str, Any]], None]


def _deferred(position: int, change: Callable[[torch.Tensor], Any]) -> Spoil:
    def spoil(arguments: dict[str, Any]) -> None:
        parts = list(arguments["flashinfer_output"])
        parts[position] = change(parts[position])
        arguments["flashinfer_output"] = parts

    return spoil


def _put(**values: Any) -> Spoil:
    return lambda arguments: arguments.update(values)


def _returned(change: Callable[[Any], Any]) -> Spoil:
    def spoil(arguments: dict[str, Any]) -> None:
        arguments["flashinfer_output"] = change(arguments["flashinfer_output"])

    return spoil


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    wide = torch.cat([tensor, tensor], dim=-1)
    return wide[..., : tensor.shape[-1]]


def _one_more(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor[-1:]])


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta")


_ROUTES = {"local": 0.5, "tokens": 4, "top_k": 3}
_FLAT = {**_ROUTES, "flat": True}
_FINAL = {"routed": "finalized", "tokens": 4}
_ALIASED = {**_FINAL, "aliased": True}

# By name: which legal case, and how it is spoiled.
_ILLEGAL: dict[str, dict[str, tuple[dict[str, Any], Spoil]]] = {
    CONVERT: {
        "num-tokens-negative": (_ROUTES, _put(num_tokens=-1)),
        "top-k-zero": (_ROUTES, _put(top_k=0)),
        "top-k-negative": (_ROUTES, _put(top_k=-3)),
        "finalized-two-tensors": (_FINAL, _returned(lambda given: [given[0], given[0]])),
        "finalized-no-tensor": (_FINAL, _returned(lambda given: [])),
        "finalized-none": (_FINAL, _returned(lambda given: None)),
        "finalized-list-of-none": (_FINAL, _returned(lambda given: [None])),
        "deferred-one-tensor": (_ROUTES, _returned(lambda given: given[0])),
        "deferred-two-tensors": (_ROUTES, _returned(lambda given: given[:2])),
        "deferred-four-tensors": (_ROUTES, _returned(lambda given: [*given, given[2]])),
        "deferred-a-none": (_ROUTES, _deferred(1, lambda tensor: None)),
        "deferred-with-destination": (_ROUTES, _put(finalized_output=torch.empty(4, 256))),
        "gemm2-rank-3": (_ROUTES, _deferred(0, lambda tensor: tensor.unsqueeze(0))),
        "gemm2-rank-1": (_ROUTES, _deferred(0, torch.flatten)),
        "map-int64": (_ROUTES, _deferred(2, lambda tensor: tensor.long())),
        "weights-too-many": (_FLAT, _deferred(1, _one_more)),
        "map-too-many": (_FLAT, _deferred(2, _one_more)),
        "map-too-few": (_FLAT, _deferred(2, lambda tensor: tensor[:-1].contiguous())),
        "top-k-other-than-the-flat-map": (_FLAT, _put(top_k=2)),
        "num-tokens-other-than-the-map": (_ROUTES, _put(num_tokens=3)),
        "gemm2-strided": (_ROUTES, _deferred(0, _strided)),
        "weights-strided": (_ROUTES, _deferred(1, _strided)),
        "map-strided": (_ROUTES, _deferred(2, _strided)),
        "weights-elsewhere": (_ROUTES, _deferred(1, _meta)),
        "map-elsewhere": (_ROUTES, _deferred(2, _meta)),
    },
    ROUTE_MAJOR: {
        "routes-too-few": (
            {"tokens": 4, "top_k": 3, "flat": True},
            lambda arguments: arguments.update(routes=arguments["routes"][:-1]),
        ),
    },
}


def _illegal(plan: Plan, name: str) -> Iterator[Trial]:
    for variation, (fixed, _) in _ILLEGAL[name].items():
        cases = draw(plan, name, variation, 1, fixed={"hidden": 256, **fixed})
        yield from trials(cases, variation)


def _refused(subject: Subject, trial: Trial, arguments: dict[str, Any], what: str) -> None:
    try:
        subject.implementation.get(trial.operation)(**arguments)
    except ValueError as error:
        subject.require(bool(str(error).strip()), f"{what}: refused without saying why")
    except Exception as error:
        if trial.operation == ROUTE_MAJOR:
            subject.require(True, "")
            return
        raise subject.violation(
            f"{what}: {type(error).__name__} ({error}), not a ValueError that names it"
        ) from error
    else:
        subject.require(False, f"{what}: accepted")


@checks_rule("CONVERT-2", _illegal, varies=True, believed=(Phase.REFUSAL, 10))
def test_convert_2_illegal_layouts_are_refused(subject: Subject, trial: Trial) -> None:
    arguments = trial.case.arguments(device=subject.plan.device)
    _ILLEGAL[trial.operation][trial.variation][1](arguments)
    _refused(subject, trial, arguments, trial.variation)


def _with_tensors(plan: Plan, name: str) -> Iterator[Trial]:
    for trial in _legal(plan, name):
        if trial.case.tokens:
            yield trial


@checks_rule("CONVERT-3", _with_tensors, believed=(Phase.CONVERSION, 10))
def test_convert_3_nothing_is_copied(subject: Subject, trial: Trial) -> None:
    case = trial.case
    arguments = case.arguments(device=subject.plan.device)
    made = subject.converted(arguments)
    if case.routed == "finalized":
        given = arguments["flashinfer_output"]
        pairs = [("the finalized tensor", made, given[0] if isinstance(given, list) else given)]
    elif trial.operation == CONVERT:
        rows, weights, index = arguments["flashinfer_output"]
        pairs = [
            ("gemm2_permuted", made.gemm2_permuted, rows),
            ("expert_weights", made.expert_weights, weights),
            ("expanded_idx_to_permuted_idx", made.expanded_idx_to_permuted_idx, index),
        ]
    else:
        pairs = [
            ("gemm2_permuted", made.gemm2_permuted, arguments["routes"]),
            ("expert_weights", made.expert_weights, arguments["topk_weights"]),
        ]
    for name, found, given in pairs:
        subject.require(found.data_ptr() == given.data_ptr(), f"{name} was copied")
        subject.require(found.dtype == given.dtype, f"{name} is {found.dtype}, not {given.dtype}")


_DESTINATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "destination-elsewhere": torch.clone,
    "destination-of-other-shape": lambda tensor: tensor[:-1],
    "destination-of-other-dtype": lambda tensor: tensor.view(torch.float16),
    "destination-of-other-offset": lambda tensor: torch.cat([tensor, tensor])[len(tensor) :],
}


def _destinations(plan: Plan, name: str) -> Iterator[Trial]:
    for flat in (False, True):
        fixed = {**_ALIASED, "flat": flat}
        cases = list(draw(plan, name, ("alias", flat), 1, fixed=fixed))
        yield from trials(cases)
        for variation in _DESTINATIONS:
            yield from trials(cases, variation)


@checks_rule("CONVERT-4", _destinations, varies=None, believed=(Phase.REFUSAL, 20))
def test_convert_4_a_destination_is_aliased(subject: Subject, trial: Trial) -> None:
    arguments = trial.case.arguments(device=subject.plan.device)
    given = arguments["flashinfer_output"]
    given = given[0] if isinstance(given, list) else given
    if trial.variation:
        arguments["finalized_output"] = _DESTINATIONS[trial.variation](given)
        _refused(subject, trial, arguments, trial.variation)
        return
    made = subject.converted(arguments)
    subject.require(
        made.data_ptr() == given.data_ptr(), "returned another tensor than its destination"
    )
