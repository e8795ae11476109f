"""The verdict on dumps, in the form of a run of the suite."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from moetail.conformance.cases.tensors import tensors_in
from moetail.conformance.diagnosis import diagnose, rule_named
from moetail.conformance.dumps.files import (
    CONVERSIONS,
    Dump,
    DumpError,
    load_dump,
    signature_of,
)
from moetail.conformance.judge import Verdict, judge
from moetail.conformance.run.call import outputs, same_bits
from moetail.conformance.run.check import TAIL
from moetail.conformance.run.evidence import verdict_evidence
from moetail.conformance.run.results import CONFORMS, NOT_JUDGED, VIOLATES, Results, TrialResult
from moetail.conformance.run.runner import diagnosis_fields
from moetail.reference import BeamAllReduceWorkspace, Reference
from moetail.spec import OPERATIONS, ContractError, checks, operation
from moetail.spec.rules import ROUTE_MAJOR

__all__ = ["judge_dumps", "judge_files"]


def judge_files(paths: Sequence[str | Path]) -> Results:
    """Judge dumps; those of one distributed call, one of each rank, are judged together.

    Raises:
        DumpError: a file that cannot be read, or ranks that are missing or do not fit.
    """
    return judge_dumps([load_dump(path) for path in paths])


def judge_dumps(dumps: Sequence[Dump]) -> Results:
    """As :func:`judge_files`, of dumps that are loaded."""
    groups = _groups(dumps)
    names = {dump.operation for dump in dumps}
    operations = tuple(item.name for item in OPERATIONS if item.name in names)
    results = Results(
        implementation=", ".join(dict.fromkeys(_implementation(dump) for dump in dumps)),
        provided=operations,
        plan={
            "profile": "dump",
            "ranks": sorted({len(group) for group in groups}),
            "device": "cpu",
            "dumps": ", ".join(dump.shown for dump in dumps),
            "captured": "; ".join(dict.fromkeys(_where(dump) for dump in dumps)),
        },
        operations=operations,
        rules=(TAIL,),
    )
    for group in groups:
        results.trials += _Group(group).trials()
    return results


def _implementation(dump: Dump) -> str:
    """Who provides the operation; of a mapped function, its own name."""
    return dump.function.removesuffix(f".{dump.operation}")


def _where(dump: Dump) -> str:
    return ", ".join(f"{name} {value}" for name, value in dump.environment.items())


def _groups(dumps: Sequence[Dump]) -> list[list[Dump]]:
    """The dumps of each call, ranks in order."""
    calls: dict[tuple[object, ...], dict[int, Dump]] = {}
    for number, dump in enumerate(dumps):
        together = operation(dump.operation).distributed
        key = (dump.operation, dump.call, dump.world_size) if together else (number,)
        ranks = calls.setdefault(key, {})
        if dump.rank in ranks:
            raise DumpError(
                dump.path,
                f"rank {dump.rank} of call {dump.call}, which {ranks[dump.rank].path} is too",
                "one file for each rank of a call",
            )
        ranks[dump.rank] = dump
    groups = []
    for ranks in calls.values():
        group = [ranks[rank] for rank in sorted(ranks)]
        if operation(group[0].operation).distributed:
            _check_ranks(group)
        groups.append(group)
    return groups


_REPLICATED = (
    "residual",
    "post_weight",
    "post_eps",
    "next_weight",
    "next_eps",
    "scales",
    "routed_scale",
)


def _check_ranks(group: Sequence[Dump]) -> None:
    first = group[0]
    size = first.world_size
    if len(group) < size:
        there = {dump.rank for dump in group}
        absent = list(islice((rank for rank in range(size) if rank not in there), 8))
        more = size - len(group) - len(absent)
        raise DumpError(
            first.path,
            f"call {first.call} of {first.operation} without rank "
            f"{', '.join(map(str, absent))}{f' and {more:,} more' if more else ''} of {size}",
            "the files of all ranks of a distributed call together",
        )
    for dump in group[1:]:
        for name in ("num_tokens", "tokens"):
            if getattr(dump, name) != getattr(first, name):
                raise DumpError(
                    dump.path,
                    f"{name} {getattr(dump, name)}",
                    f"{getattr(first, name)}, as on rank 0 ({first.path})",
                )
        for name in _REPLICATED:
            if not _equal(dump.arguments.get(name), first.arguments.get(name)):
                raise DumpError(
                    dump.path,
                    f"another {name} than on rank 0 ({first.path})",
                    "the same on every rank, as the contract has it",
                )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return same_bits(one, other)
    return type(one) is type(other) and bool(one == other)


class _Group:
    """One call, on all of its ranks."""

    def __init__(self, dumps: Sequence[Dump]) -> None:
        self.dumps = dumps
        self.operation = dumps[0].operation
        self.calls = [dump.arguments for dump in dumps]
        self.values = [dump.result for dump in dumps]
        self.case = " ".join(dump.shown for dump in dumps)
        self.elements = sum(tensor.numel() for _, tensor in tensors_in(self.values))

    def trials(self) -> list[TrialResult]:
        raised = next((dump for dump in self.dumps if dump.raised), None)
        refusal = self._refusal()
        if raised is not None:
            return [self._raised(raised, refusal)]
        if refusal is not None:
            found = f"returned, where a refusal is due: {refusal}"
            return [self._trial(refusal.rule, _REFUSES, found=found)]
        if self.operation in CONVERSIONS:
            return self._conversion()
        started = time.perf_counter()
        whole = self._arithmetic()
        whole = replace(whole, seconds=round(time.perf_counter() - started, 4))
        around = [*self._unchanged(), *self._destination(), *self._replicas()]
        if whole.status == NOT_JUDGED:  # what goes well beside it does not make it a conforming one
            around = [trial for trial in around if trial.status == VIOLATES]
        return [*around, whole]

    def _trial(self, rule: str, check: str, *, found: str = "", **more: Any) -> TrialResult:
        """A violation where ``found`` says something, unless ``status`` is given.

        Args:
            check: the name of the suite's check that is about it.
        """
        from moetail.conformance.suite import checks  # only to judge, not to capture

        given: dict[str, Any] = {"status": VIOLATES if found else CONFORMS, "judged": 1, **more}
        if given["status"] == VIOLATES:
            files = [dump.shown for dump in self.dumps]
            given["repeat"] = shlex.join(["moetail", "judge", *files])
        return TrialResult(
            rule=rule,
            operation=self.operation,
            case=self.case,
            check=check,
            believed=next(item.believed for item in checks() if item.name == check),
            elements=self.elements,
            found=found,
            **given,
        )

    def _refusal(self) -> ContractError | None:
        """Why the contract refuses these arguments, if it does."""
        for dump in self.dumps:
            try:
                _refuse(dump)
            except ContractError as error:
                return error
        return None

    def _raised(self, dump: Dump, refusal: ContractError | None) -> TrialResult:
        if refusal is not None:
            if dump.changed:
                found = f"changed {', '.join(dump.changed)} and then raised {dump.raised}"
                return self._trial(
                    "DOMAIN-2", "test_domain_2_a_refusal_changes_nothing", found=found
                )
            return self._trial(refusal.rule, _REFUSES)
        where = f"rank {dump.rank}: " if len(self.dumps) > 1 else ""
        rule, check = TAIL, "test_tail_on_any_case"
        if self.operation in CONVERSIONS:
            rule, check = "CONVERT-1", "test_convert_1_legal_layouts_are_accepted"
        found = f"{where}raised on legal arguments: {dump.raised}"
        return self._trial(rule, check, found=found, trace=dump.trace)

    def _unchanged(self) -> Iterator[TrialResult]:
        looked = [dump for dump in self.dumps if dump.changed is not None]
        names = [
            f"{Path(dump.shown).name}: {name}" for dump in looked for name in dump.changed or ()
        ]
        if looked:
            found = f"changed its arguments: {', '.join(names)}" if names else ""
            yield self._trial(
                "RUN-2", "test_run_2_inputs_are_not_modified", found=found, judged=len(looked)
            )

    def _destination(self) -> Iterator[TrialResult]:
        # Only the fault is a result: that every element was written is for the arithmetic to say.
        if any(dump.destination is False for dump in self.dumps):
            found = "returned a tensor other than the given output"
            yield self._trial("RUN-3", "test_run_3_every_element_is_written", found=found)

    def _replicas(self) -> Iterator[TrialResult]:
        if len(self.dumps) == 1:
            return
        first, found = outputs(self.values[0]), ""
        for dump in self.dumps[1:]:
            other = outputs(dump.result)
            for name, tensor in first.items():
                if not found and not (name in other and same_bits(tensor, other[name])):
                    found = f"rank {dump.rank}'s {name} has other bits than rank 0's"
        judged = sum(tensor.numel() for tensor in first.values())
        yield self._trial(
            "OWN-3", "test_own_3_replicas_are_bit_identical", found=found, judged=judged
        )

    def _arithmetic(self) -> TrialResult:
        verdict = judge(self.operation, self.calls, self.values)
        counts: dict[str, Any] = {
            "judged": verdict.judged,
            "not_judged": verdict.not_judged,
            "ambiguous": verdict.ambiguous,
        }
        check = "test_tail_on_any_case"
        if not verdict.conforms:
            found = (
                f"{verdict.describe()} ({verdict.wrong} of {verdict.judged} elements wrong)"
                f"{self._token(verdict)}"
            )
            diagnosis = diagnose(self.operation, self.calls, verdict)
            return self._trial(
                rule_named(TAIL, diagnosis),
                check,
                found=found,
                **diagnosis_fields(diagnosis),
                evidence=verdict_evidence(verdict),
                **counts,
            )
        if verdict.judged:
            return self._trial(TAIL, check, **counts)
        if not verdict.not_judged:  # no tokens: the shapes were right
            return self._trial("LIVE-2", "test_live_2_zero_tokens_give_empty_outputs")
        found = "every element's class depends on a legal choice"
        return self._trial(TAIL, check, status=NOT_JUDGED, found=found, **counts)

    def _token(self, verdict: Verdict) -> str:
        kept = self.dumps[0].tokens
        first = None if verdict.first is None else verdict.first.first
        if kept is None or first is None:
            return ""
        row = first[0][0]
        return f"; row {row} is token {kept[row]} of {self.dumps[0].num_tokens}"

    def _conversion(self) -> list[TrialResult]:
        """Nothing is computed: what comes out is what went in, in other words."""
        (dump,) = self.dumps
        due = getattr(Reference(), self.operation)(**dump.arguments)
        found, copied = "", ""
        made, expected = outputs(dump.result), outputs(due)
        for name, tensor in expected.items():
            shown = name.removeprefix("output").lstrip(".") or "the finalized tensor"
            got = made.get(name)
            if not isinstance(got, Tensor):
                found = found or f"{shown} is missing from what was returned"
            elif not same_bits(got, tensor):
                found = found or (
                    f"{shown} is {list(got.shape)} {got.dtype} with other bits than the "
                    f"{list(tensor.shape)} {tensor.dtype} that is due"
                )
            elif tensor.numel() and got.data_ptr() != tensor.data_ptr() and _shared(dump, tensor):
                copied = copied or f"{shown} was copied"
        if not found and getattr(dump.result, "route_major", False) != getattr(
            due, "route_major", False
        ):
            found = f"route_major is {dump.result.route_major}"
        rule, check = "CONVERT-1", "test_convert_1_legal_layouts_are_accepted"
        if self.operation == ROUTE_MAJOR and ("expanded" in found or "route_major" in found):
            rule, check = "PACK-3", "test_pack_3_route_major_map"
        return [
            *self._unchanged(),
            self._trial("CONVERT-3", "test_convert_3_nothing_is_copied", found=copied),
            self._trial(rule, check, found=found, judged=max(1, self.elements)),
        ]


_REFUSES = "test_domain_1_refuses_what_is_outside"


def _shared(dump: Dump, tensor: Tensor) -> bool:
    """Whether a tensor of the reference's result is one of the arguments' storage."""
    return any(tensor.data_ptr() == one.data_ptr() for _, one in tensors_in(dump.arguments))


def _bound(dump: Dump) -> dict[str, Any]:
    """The arguments, with the contract's defaults; without a workspace, one that fits."""
    call = dict(dump.arguments)
    if operation(dump.operation).distributed and call.get("workspace") is None:
        rows = call["residual"]
        call["workspace"] = BeamAllReduceWorkspace(
            world_size=dump.world_size,
            rank=dump.rank,
            hidden_size=rows.shape[-1],
            max_tokens=rows.shape[0],
            device_group=None,  # type: ignore[arg-type]
        )
    bound = signature_of(dump.operation).bind(**call)
    bound.apply_defaults()
    return dict(bound.arguments)


def _refuse(dump: Dump) -> None:
    """Raise what the contract refuses of a call."""
    item = operation(dump.operation)
    if not item.computes:
        getattr(Reference(), item.name)(**dump.arguments)
        return
    call = _bound(dump)
    checks.check(item, call)
    checks.check_values(item, call)
