"""The implementation under test, with the means to run and to judge it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moetail.conformance.cases import Case
from moetail.conformance.implementation import Implementation, load
from moetail.conformance.judge import judge
from moetail.conformance.run import ranks
from moetail.conformance.run.call import (
    CallResult,
    CallSpec,
    Raised,
    bits,
    execute,
    outputs,
    same_bits,
)
from moetail.conformance.run.plan import Plan
from moetail.conformance.run.ranks import RankError, RankPool
from moetail.conformance.run.trial import NotJudged, Run, Tally, Trial, Violation
from moetail.conformance.run.virtual import ENVIRONMENT, Lost, execute_together
from moetail.conformance.run.workspaces import Unsupported, describe_workspace
from moetail.spec import operation
from moetail.spec.rules import WORKSPACE

__all__ = ["Subject"]


@dataclass
class Subject:
    """The implementation on trial, and the means to run and to judge it.

    Attributes:
        rule, trial, tally: what is being decided, and how much was looked at so far.
        ended: operations that left a rank behind, and how; they are not tried again.
        fresh: no workspace may have served earlier trials.
        shared: one of this trial's may have.
        diagnosed: the sizes of the violations that were diagnosed, by rule and operation.
        shown: the sizes of the smallest and the largest violation so far, by the rule that was
            named and operation; a report shows those.
    """

    implementation: Implementation
    plan: Plan
    rule: str = ""
    trial: Trial | None = None
    tally: Tally = field(default_factory=Tally)
    ended: dict[str, str] = field(default_factory=dict)
    fresh: bool = False
    shared: bool = False
    diagnosed: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    shown: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    _pool: RankPool | None = None

    @classmethod
    def of(cls, spec: str, plan: Plan, pool: RankPool | None = None) -> Subject:
        return cls(load(spec), plan, _pool=pool)

    @property
    def pool(self) -> RankPool:
        """The rank processes, started when first needed."""
        if self._pool is None:
            size, environment = max(self.plan.ranks), {}
            if self.plan.virtual_ranks:
                size, environment = 1, ENVIRONMENT
            elif self.plan.device == "cuda":
                size = max(1, min(size, torch.cuda.device_count()))
            self._pool = RankPool(
                size,
                device=self.plan.device,
                timeout=self.plan.timeout,
                environment=environment,
            )
        return self._pool

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def begin(self, rule_id: str, trial: Trial) -> None:
        """Everything from here on counts for this rule and trial."""
        self.rule, self.trial, self.tally, self.shared = rule_id, trial, Tally(), False

    # --- running ------------------------------------------------------------------------------

    def run(self, *specs: CallSpec) -> list[Run]:
        """Make calls, on all ranks of a distributed operation with one workspace."""
        case, device = specs[0].case, self.plan.device
        if operation(case.operation).distributed:
            keep = self.plan.keep_workspaces and not self.fresh
            self.shared |= keep
            on_ranks = self._on_virtual_ranks if self.plan.virtual_ranks else self._on_ranks
            by_rank = on_ranks(case, (self.implementation.spec, device, specs, keep))
        else:
            by_rank = [execute(None, 0, self.implementation.spec, device, specs)]
        by_spec = zip(*(_padded(outcomes, len(specs)) for outcomes in by_rank), strict=True)
        return [Run(spec, list(each)) for spec, each in zip(specs, by_spec, strict=True)]

    def _on_ranks(self, case: Case, arguments: tuple[Any, ...]) -> list[list[CallResult]]:
        """Each rank's outcomes, up to one that raised."""
        self._need_gpus(case.ranks)
        returned = self.pool.run(case.ranks, execute, *arguments, operation=case.operation)
        return [_outcomes(outcome) for outcome in returned]

    def _on_virtual_ranks(self, case: Case, arguments: tuple[Any, ...]) -> list[list[CallResult]]:
        """As :meth:`_on_ranks`, in one process of the pool, which a call that hangs can take."""
        name, ranks = case.operation, tuple(range(case.ranks))
        try:
            (returned,) = self.pool.run(1, execute_together, case.ranks, *arguments, operation=name)
        except RankError as error:
            message = f"the {case.ranks} virtual ranks {error.reason} in {name}"
            raise RankError(message, ranks, error.reason, error.details) from error
        if returned.error is None:
            return list(returned.value)
        found = returned.error.exception
        if isinstance(found, Unsupported):
            raise NotJudged(str(found))
        if isinstance(found, Lost):
            message = f"{found} in {name} ({case.ranks} virtual ranks)"
            raise RankError(message, ranks, str(found), returned.error.traceback)
        raise RuntimeError(
            f"the virtual ranks failed outside the operation: {returned.error.type}: "
            f"{returned.error.message}\n{returned.error.traceback}"
        )

    def _need_gpus(self, ranks: int) -> None:
        if self.plan.device == "cuda" and ranks > (found := torch.cuda.device_count()):
            raise NotJudged(
                f"{ranks} ranks need as many GPUs, not {found}; --virtual-ranks puts them on one"
            )

    def workspaces(
        self, size: int, hidden_size: int, max_tokens: int, dtype: str
    ) -> list[dict[str, Any]]:
        """What ``BeamAllReduceWorkspace.create`` made on each rank of a group of ``size``."""
        if self.plan.virtual_ranks:
            raise NotJudged("create takes a process group, which virtual ranks do not have")
        self._need_gpus(size)
        returned = self.pool.run(
            size,
            describe_workspace,
            self.implementation.spec,
            hidden_size,
            max_tokens,
            dtype,
            operation=WORKSPACE,
        )
        for outcome in returned:
            if outcome.error is not None:
                raise RuntimeError(f"rank {outcome.rank}: {outcome.error.traceback}")
        return [outcome.value for outcome in returned]

    def converted(self, arguments: dict[str, Any]) -> Any:
        """What a conversion returned; whether it may refuse a legal layout is CONVERT-1's."""
        assert self.trial is not None
        try:
            return self.implementation.get(self.trial.operation)(**arguments)
        except Exception as error:
            raise NotJudged(
                f"raised {type(error).__name__} ({error}), which is CONVERT-1's to say"
            ) from error

    # --- deciding -----------------------------------------------------------------------------

    def violation(self, found: str, **details: Any) -> Violation:
        assert self.trial is not None
        return Violation(self.rule, self.trial, found, **details)

    def require(self, condition: bool, found: str, *runs: Run) -> None:
        """One comparison, counted; ``found`` says what is wrong where it does not hold."""
        self.tally.judged += 1
        if not condition:
            raise self.violation(found, runs=runs)

    def returned(self, run: Run) -> None:
        """The call is legal, so no rank may have raised."""
        for rank, outcome in enumerate(run.outcomes):
            if outcome.refusal:
                where = f"rank {rank}: " if len(run.outcomes) > 1 else ""
                raise self.violation(
                    f"{where}raised on legal arguments: {outcome.refusal}", runs=[run]
                )

    def conforms(self, *runs: Run) -> None:
        """Every element of every run is admissible."""
        for run in runs:
            self.returned(run)
            self.conforms_values(run, run.calls)

    def conforms_values(self, run: Run, calls: list[dict[str, Any]]) -> None:
        """What a run returned is admissible for the arguments ``calls``, rank by rank."""
        verdict = judge(run.spec.case.operation, calls, run.values)
        self.tally.add(Tally(verdict.judged, verdict.not_judged, verdict.ambiguous))
        if not verdict.conforms:
            raise self.violation(
                f"{verdict.describe()} ({verdict.wrong} of {verdict.judged} elements wrong)",
                verdict=verdict,
                runs=[run],
            )

    def conforms_at(self, run: Run, tokens: Tensor) -> None:
        """Every element of the tokens in a bool mask ``[T]`` is admissible."""
        verdict = judge(run.spec.case.operation, run.calls, run.values)
        for output in verdict.outputs:
            mask = tokens.to(output.wrong_mask.device)
            wrong = output.wrong_mask & mask[:, None]
            self.tally.judged += int(mask.sum()) * wrong.shape[1]
            if bool(wrong.any()):
                token = int(wrong.nonzero()[0][0])
                raise self.violation(
                    f"{verdict.describe()} ({int(wrong.sum())} wrong, from token {token} on)",
                    verdict=verdict,
                    runs=[run],
                )

    def classes(self, *runs: Run) -> None:
        """Every element is NaN, infinite or finite where its admissible values are."""
        for run in runs:
            self.returned(run)
            verdict = judge(run.spec.case.operation, run.calls, run.values)
            for output in verdict.outputs:
                if output.got is None or output.lo is None or output.hi is None:
                    raise self.violation(verdict.describe(), verdict=verdict, runs=[run])
                same = (output.lo == output.hi) | output.lo.isnan()
                judged = same | (output.lo.isfinite() & output.hi.isfinite())
                infinite = output.lo.isinf() & (output.got != output.lo)
                wrong = judged & (
                    (output.got.isnan() != output.lo.isnan())
                    | (output.got.isinf() != output.lo.isinf())
                    | infinite
                )
                self.tally.judged += int(judged.sum())
                self.tally.not_judged += int((~judged).sum())
                if bool(wrong.any()):
                    index = tuple(int(i) for i in wrong.nonzero()[0])
                    where = f"rank {output.rank}: " if len(run.outcomes) > 1 else ""
                    raise self.violation(
                        f"{where}{output.name}{list(index)} is {float(output.got[index])!r}; "
                        f"admissible: {float(output.lo[index])!r} "
                        f"({int(wrong.sum())} of {wrong.numel()} elements are of another class)",
                        verdict=verdict,
                        runs=[run],
                    )

    def same(self, first: Run, second: Run, what: str) -> None:
        """Two runs gave the same bits on every rank."""
        self.returned(first)
        self.returned(second)
        for rank, (left, right) in enumerate(zip(first.values, second.values, strict=True)):
            self.same_values(
                left, right, f"{what}, on rank {rank}" if rank else what, first, second
            )

    def same_values(self, left: Any, right: Any, what: str, *runs: Run) -> None:
        """Two results have the same bits; the violation shows the first element that differs."""
        names_left, names_right = outputs(left), outputs(right)
        self.require(
            names_left.keys() == names_right.keys(), f"{what}: other outputs are None", *runs
        )
        for name, tensor in names_left.items():
            other = names_right[name]
            self.tally.judged += max(1, tensor.numel())
            if same_bits(tensor, other):
                continue
            if tensor.shape != other.shape or tensor.dtype != other.dtype:
                raise self.violation(
                    f"{what}: {list(tensor.shape)} {tensor.dtype} against "
                    f"{list(other.shape)} {other.dtype}",
                    runs=runs,
                )
            differs = bits(tensor) != bits(other.to(tensor.device))
            index = tuple(int(i) for i in differs.nonzero()[0])
            place = f"{name}{list(index)}"
            raise self.violation(
                f"{what}: {place} is {float(tensor[index])!r} and then {float(other[index])!r} "
                f"({int(differs.sum())} of {differs.numel()} elements differ)",
                runs=runs,
                compared=(name, tensor, other),
            )


def _outcomes(returned: ranks.Outcome) -> list[CallResult]:
    """A rank's outcomes, up to the call that raised if one did."""
    if returned.error is None:
        return list(returned.value)
    raised = returned.error.exception
    if not isinstance(raised, Raised):
        raise RuntimeError(
            f"rank {returned.rank} failed outside the operation: {returned.error.type}: "
            f"{returned.error.message}\n{returned.error.traceback}"
        )
    return raised.outcomes


def _padded(outcomes: list[CallResult], specs: int) -> list[CallResult]:
    """One outcome for each call, also for those behind one that raised."""
    last = outcomes[-1]
    raised = last.refusal or "on another rank"
    missing = CallResult(
        refusal=f"not reached, since an earlier call raised {raised}", not_mapped=last.not_mapped
    )
    return [*outcomes, *[missing] * (specs - len(outcomes))]
