"""Which known deviation explains the elements that are wrong.

The deviations are the mutants that change values. Each is evaluated on the inputs that the
implementation had (several ranks one after another in this process), and explains an element if it
gives the very bits that were found there. It is named only if it is right, too, where the
implementation is right. Two deviations at once are found by composing their classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moetail.conformance.cases.tensors import mapped
from moetail.conformance.catalogue import MUTANTS, Mutant
from moetail.conformance.judge import Verdict
from moetail.reference import BeamAllReduceWorkspace, Reference
from moetail.spec import RULES, Workspace, operation
from moetail.spec.rules import (
    ALLREDUCE,
    BOUNDARY,
    CONVERT,
    FINALIZE,
    FUSED,
    MOE_OUTPUT,
    ROUTE_MAJOR,
)

__all__ = ["DEVIATIONS", "Diagnosis", "diagnose", "rule_named", "simulate"]

MOST_TERMS = 1 << 20
"""Larger calls are cut to their first wrong tokens (and as many others), where that can be done."""

NAMED = 0.5
"""The least share of the wrong elements that a deviation must explain to be named."""

PRECISE = 0.99
"""The least share of the right elements on which it must be right."""

CERTAIN = 0.9
"""The least share from which on the diagnosis names the rule, and not the check that failed."""

SECOND = 0.03
"""A second deviation is looked for if more than this share is left, and must explain as much."""

_Call = Mapping[str, Any]


def _changes_values(mutant: Mutant) -> bool:
    """Whether one call on one set of inputs shows it."""
    if CONVERT in mutant.operations or ROUTE_MAJOR in mutant.operations:
        return False
    kind = mutant.rule.split("-")[0]
    if kind in ("ROUND", "OWN") or mutant.rule in ("ROUTE-1", "ROUTE-3", "ROUTE-4", "ROUTE-5"):
        hooks = ("hook", "default-", "threshold")
        return mutant.rule != "OWN-3" and not any(part in mutant.id for part in hooks)
    return mutant.rule in ("PACK-2", "PACK-3", "LIVE-1") and mutant.id != "order-from-row-count"


DEVIATIONS: tuple[Mutant, ...] = tuple(filter(_changes_values, MUTANTS))


@dataclass(frozen=True)
class Diagnosis:
    """What explains a verdict.

    Attributes:
        deviations: one mutant, or two that occur together; empty where none is known.
        explained: wrong elements on which they give the bits that were found.
        wrong: wrong elements that were looked at.
        precision: the share of the right elements on which they are right too.
    """

    deviations: tuple[Mutant, ...]
    explained: int
    wrong: int
    precision: float

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules that are broken, the first named first."""
        return tuple(dict.fromkeys(mutant.rule for mutant in self.deviations))

    @property
    def share(self) -> float:
        return self.explained / self.wrong if self.wrong else 0.0

    def describe(self) -> str:
        """One line: ``scale-before-rounding (ROUND-2) explains 100% of 1,234 wrong elements``."""
        if not self.deviations:
            return "no known deviation explains it"
        named = " and ".join(f"{mutant.id} ({mutant.rule})" for mutant in self.deviations)
        verb = "explain" if len(self.deviations) > 1 else "explains"
        together = "together " if len(self.deviations) > 1 else ""
        share = "all" if self.explained == self.wrong else f"{100 * self.share:.3g}%"
        elements = "element" if self.wrong == 1 else "elements"
        return f"{named} {together}{verb} {share} of {self.wrong:,} wrong {elements}"


# --- several ranks in one process -----------------------------------------------------------------


class _Waits(BaseException):
    """A rank needs the rows of the others; no ``except Exception`` of a mutant may see it."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = rows


class _Exchange(Reference):
    """The reference with its collective replaced by the rows that all ranks have left so far."""

    left: tuple[Tensor, ...] = ()
    turn = 0

    def gather(
        self, workspace: Workspace, rows: Tensor, num_tokens: int, *, through_hook: bool = False
    ) -> Tensor:
        if self.turn == len(self.left):
            raise _Waits(rows)
        self.turn += 1
        return self.left[self.turn - 1][:num_tokens].clone()


def simulate(
    implementation: type[Reference], operation_name: str, calls: Sequence[_Call]
) -> list[Any]:
    """What each rank returns, one rank after another in this process.

    Every rank runs up to the first gather whose rows are not known; once all are there, all run
    again from the start, and one gather further.
    """
    if not operation(operation_name).distributed:
        return [
            _method(implementation(), operation_name)(**mapped(call, Tensor.clone))
            for call in calls
        ]
    bases = (_Exchange,) if implementation is Reference else (implementation, _Exchange)
    exchanging = type("Simulated", bases, {})
    left: tuple[Tensor, ...] = ()
    while True:
        results, waiting = [], []
        for rank, call in enumerate(calls):
            instance = exchanging()
            instance.left = left
            try:
                arguments = {
                    **mapped(call, Tensor.clone),
                    "workspace": _workspace(call, rank, len(calls)),
                }
                results.append(_method(instance, operation_name)(**arguments))
            except _Waits as waits:
                waiting.append(waits.rows)
        if not waiting:
            return results
        if len(waiting) != len(calls):
            raise RuntimeError(f"{len(waiting)} of {len(calls)} ranks wait for the others")
        left = (*left, torch.cat(waiting))


def _method(instance: Any, name: str) -> Any:
    return getattr(instance, name)


def _workspace(call: _Call, rank: int, ranks: int) -> BeamAllReduceWorkspace:
    tokens, hidden_size = call["residual"].shape
    return BeamAllReduceWorkspace(
        world_size=ranks,
        rank=rank,
        hidden_size=hidden_size,
        max_tokens=tokens,
        device_group=None,  # type: ignore[arg-type]
    )


# --- the elements ---------------------------------------------------------------------------------


@dataclass
class _Evidence:
    """One output of one rank: what was found, what is admissible, and what is wrong."""

    rank: int
    place: int
    got: Tensor
    lo: Tensor
    hi: Tensor
    wrong: Tensor

    def match(self, results: Sequence[Any]) -> tuple[int, int]:
        """(wrong elements with the bits that were found, right elements that are right)."""
        value = results[self.rank]
        value = value[self.place] if isinstance(value, (tuple, list)) else value
        if not isinstance(value, Tensor) or value.shape != self.got.shape:
            return 0, 0
        same = (value == self.got) | (value.isnan() & self.got.isnan())
        admitted = same | ((self.lo <= value) & (value <= self.hi))
        return int((same & self.wrong).sum()), int((admitted & ~self.wrong).sum())


def _evidence(operation_name: str, verdict: Verdict) -> list[_Evidence]:
    found = []
    for output in verdict.outputs:
        if output.got is not None and output.lo is not None and output.hi is not None:
            place = 1 if output.name == "normalized" else 0
            parts = (output.got, output.lo, output.hi, output.wrong_mask)
            got, lo, hi, wrong = (part.cpu() for part in parts)
            found.append(_Evidence(output.rank, place, got, lo, hi, wrong))
    return found


# --- fewer tokens ---------------------------------------------------------------------------------


def _terms(operation_name: str, call: _Call) -> int:
    if operation_name == BOUNDARY:
        return int(call["x"].numel())
    if operation_name == FINALIZE:
        return int(call["output"].numel() * call["expert_outputs"].shape[1])
    x = call["x"]
    routed: Any = getattr(x, "routed", x)
    if isinstance(routed, Tensor):
        return int(routed.numel())
    return int(routed.expert_weights.numel() * routed.gemm2_permuted.shape[1])


def _cut(operation_name: str, call: _Call, tokens: Tensor) -> dict[str, Any]:
    """The call for some tokens only: what is not a token's own stays."""
    cut = dict(call)
    if "residual" in cut:
        cut["residual"] = cut["residual"][tokens]
    if operation_name == FINALIZE:
        dead = torch.arange(cut["output"].shape[0], cut["expert_outputs"].shape[0])
        cut["expert_outputs"] = cut["expert_outputs"][torch.cat([tokens, dead])]
        cut["expert_weights"] = cut["expert_weights"][tokens]
        cut["output"] = cut["output"][tokens]
        return cut
    if operation_name == BOUNDARY:
        cut["x"] = cut["x"][tokens]
        return cut
    if operation_name == FUSED:
        cut["x"] = _cut_slots(cut["x"], tokens)
        return cut
    x = cut["x"]
    if x.shared_output is not None:
        x = replace(x, shared_output=x.shared_output[tokens])
    if isinstance(x.routed, Tensor):
        routed: Any = x.routed[tokens]
    else:
        # Rows stay, so a route-major output is no longer one: its map says the same.
        routed = replace(
            x.routed,
            expert_weights=x.routed.expert_weights[tokens],
            expanded_idx_to_permuted_idx=x.routed.expanded_idx_to_permuted_idx[tokens],
            route_major=False,
        )
    cut["x"] = replace(x, routed=routed)
    return cut


def _cut_slots(x: Any, tokens: Tensor) -> Any:
    top_k = x.expert_weights.shape[1]
    slots = x.gemm2_permuted.view(-1, top_k, x.gemm2_permuted.shape[1])
    index = torch.arange(len(tokens) * top_k, dtype=torch.int32).view(-1, top_k)
    return replace(
        x,
        gemm2_permuted=slots[tokens].reshape(-1, slots.shape[2]),
        expert_weights=x.expert_weights[tokens],
        expanded_idx_to_permuted_idx=index,
    )


def _bounded(
    operation_name: str, calls: list[dict[str, Any]], evidence: list[_Evidence]
) -> list[dict[str, Any]]:
    """Cuts a large call to its first wrong tokens and as many right ones."""
    terms = sum(_terms(operation_name, call) for call in calls)
    local = operation_name in (FINALIZE, BOUNDARY, FUSED, MOE_OUTPUT, ALLREDUCE)
    if terms <= MOST_TERMS or not local:
        return calls
    wrong = torch.stack([item.wrong.any(dim=1) for item in evidence]).any(dim=0)
    most = max(1, wrong.numel() * MOST_TERMS // terms)
    kept = torch.cat([wrong.nonzero()[: (most + 1) // 2], (~wrong).nonzero()[: most // 2]])
    tokens = kept.flatten().sort().values
    for item in evidence:
        for name in ("got", "lo", "hi", "wrong"):
            setattr(item, name, getattr(item, name)[tokens])
    return [_cut(operation_name, call, tokens) for call in calls]


# --- the search -----------------------------------------------------------------------------------


def _composed(first: type[Reference], second: type[Reference]) -> type[Reference] | None:
    """Both deviations in one class; None where Python finds no order for their bases."""
    try:
        return type(f"{first.__name__}And{second.__name__}", (first, second), {})
    except TypeError:
        return None


class _Search:
    def __init__(
        self, name: str, calls: Sequence[_Call], evidence: Sequence[_Evidence], prefer: str
    ) -> None:
        self.name, self.calls, self.evidence, self.prefer = name, calls, evidence, prefer
        self.wrong = sum(int(item.wrong.sum()) for item in evidence)
        self.right = sum(int((~item.wrong).sum()) for item in evidence)

    def score(self, implementation: type[Reference] | None) -> tuple[int, float] | None:
        """(wrong elements explained, precision), None where the deviation cannot run."""
        if implementation is None:
            return None
        try:
            with torch.no_grad():
                results = simulate(implementation, self.name, self.calls)
            matches = [item.match(results) for item in self.evidence]
        except Exception:
            return None
        explained, right = (sum(part) for part in zip(*matches, strict=True))
        return explained, right / self.right if self.right else 1.0

    def singles(self, deviations: Sequence[Mutant]) -> Iterator[Diagnosis]:
        """The preferred rule's first; none after one of its own that explains everything."""
        for mutant in sorted(deviations, key=lambda item: item.rule != self.prefer):
            score = self.score(mutant.implementation)
            if score is None:
                continue
            yield Diagnosis((mutant,), score[0], self.wrong, score[1])
            if mutant.rule == self.prefer and score == (self.wrong, 1.0):
                return

    def pairs(self, leads: Sequence[Mutant], others: Sequence[Mutant]) -> Iterator[Diagnosis]:
        for lead in leads:
            for other in others:
                if other is lead:
                    continue
                for first, second in ((lead, other), (other, lead)):
                    both = _composed(first.implementation, second.implementation)
                    score = self.score(both)
                    if score is not None:
                        yield Diagnosis((lead, other), score[0], self.wrong, score[1])

    def best(self, found: Sequence[Diagnosis]) -> Diagnosis | None:
        """The one that explains most, of those that contradict nothing. Where several explain as
        much: the preferred rule's, then the one that can change the fewest operations."""
        fair = [item for item in found if item.precision >= PRECISE and item.explained]
        if not fair:
            return None
        return max(
            fair,
            key=lambda item: (
                item.explained,
                item.rules[0] == self.prefer,
                item.precision,
                -sum(len(mutant.operations) for mutant in item.deviations),
            ),
        )


def diagnose(
    operation_name: str,
    calls: Sequence[_Call],
    verdict: Verdict,
    *,
    prefer: str = "",
    deviations: Sequence[Mutant] = DEVIATIONS,
) -> Diagnosis:
    """Which deviations of the catalogue explain the wrong elements of a verdict.

    Args:
        operation_name: what was called.
        calls: each rank's arguments before the call, as the judge had them.
        verdict: the judge's, on what was returned.
        prefer: the rule that the case was aimed at; decides between deviations that explain the
            same elements.
        deviations: the mutants to try, of those that can change the operation.
    """
    evidence = _evidence(operation_name, verdict)
    nothing = Diagnosis((), 0, sum(int(item.wrong.sum()) for item in evidence), 0.0)
    if not nothing.wrong:
        return nothing
    cut = _bounded(operation_name, mapped(list(calls), Tensor.cpu), evidence)
    search = _Search(operation_name, cut, evidence, prefer)
    able = [mutant for mutant in deviations if operation_name in mutant.operations]
    singles = list(search.singles(able))
    best = search.best(singles)
    unexplained = search.wrong - (best.explained if best else 0)
    if unexplained > SECOND * search.wrong:
        # Two at once: those that explain most, each with every other that explains anything.
        leads = sorted(singles, key=lambda item: -item.explained * item.precision)[:4]
        others = [item.deviations[0] for item in singles if item.explained]
        both = search.best(
            list(search.pairs([item.deviations[0] for item in leads if item.explained], others))
        )
        gained = both.explained - (best.explained if best else 0) if both else 0
        if both is not None and gained >= SECOND * search.wrong:
            best = both
    if best is None or best.share < NAMED:
        return replace(nothing, wrong=search.wrong)
    return best


def rule_named(rule: str, found: Diagnosis) -> str:
    """The rule to report where a check of ``rule`` failed and this was found.

    A case is aimed at its rule, but an implementation that breaks another rule may fail it too. The
    rule is the check's unless deviations of other rules explain nearly all that is wrong, and none
    of the check's own rule explains as much. A check of whole tails has no rule of its own.
    """
    if not found.deviations or rule in found.rules:
        return rule
    own = any(item.id == rule for item in RULES)
    return rule if own and found.share < CERTAIN else found.rules[0]
