"""Which known deviations explain the elements that are wrong.

The deviations are the mutants that one call shows. Each is evaluated on the inputs that the
implementation had (several ranks one after another in this process), and explains an element if it
gives the very bits that were found there. It is named only if it is right, too, where the
implementation is right. Two deviations at once are edits one after the other, or a behaviour under
an edited contract.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from moetail.conformance.catalogue import MUTANTS, Mutant, changed, edited
from moetail.conformance.diagnosis.evidence import Evidence, evidence_of
from moetail.conformance.diagnosis.simulate import simulate
from moetail.conformance.judge import Verdict
from moetail.spec import RULES, Operation, operation

__all__ = ["DEVIATIONS", "Diagnosis", "diagnose", "rule_named"]

NAMED = 0.5
"""The least share of the wrong elements that a deviation must explain to be named."""

PRECISE = 0.99
"""The least share of the right elements on which it must be right."""

CERTAIN = 0.9
"""The least share from which on the diagnosis names the rule, and not the check that failed."""

SECOND = 0.03
"""A second deviation is looked for if more than this share is left, and must explain as much."""

DEVIATIONS: tuple[Mutant, ...] = tuple(mutant for mutant in MUTANTS if mutant.shows)


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


# --- the search -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Search:
    evidence: Evidence
    prefer: str

    def tried(self, *deviations: Mutant) -> Diagnosis | None:
        """What deviations explain together; None where they cannot run."""
        try:
            implementation = changed(*deviations)
            with torch.no_grad():
                results = simulate(implementation, self.evidence.operation, self.evidence.calls)
            explained, precision = self.evidence.match(results)
        except Exception:
            return None
        return Diagnosis(deviations, explained, self.evidence.wrong, precision)

    def singles(self, deviations: Sequence[Mutant]) -> Iterator[Diagnosis]:
        """The preferred rule's first; none after one of its own that explains everything."""
        for mutant in sorted(deviations, key=lambda item: item.rule != self.prefer):
            found = self.tried(mutant)
            if found is None:
                continue
            yield found
            if mutant.rule == self.prefer and found.share == found.precision == 1.0:
                return

    def pairs(self, leads: Sequence[Mutant], others: Sequence[Mutant]) -> Iterator[Diagnosis]:
        for lead in leads:
            for other in others:
                for pair in _orders(lead, other) if other is not lead else ():
                    found = self.tried(*pair)
                    if found is not None:
                        yield replace(found, deviations=(lead, other))

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


def _orders(first: Mutant, second: Mutant) -> Iterator[tuple[Mutant, Mutant]]:
    """The orders of two deviations that differ: most edits commute. None of two behaviours."""
    if first.edit is None and second.edit is None:
        return
    made = []
    for pair in ((first, second), (second, first)):
        try:
            contract = edited(*pair)
        except (KeyError, ValueError):
            continue  # the first left nothing that the second could edit
        if contract not in made:
            made.append(contract)
            yield pair


def diagnose(
    name: str | Operation,
    calls: Sequence[Mapping[str, Any]],
    verdict: Verdict,
    *,
    prefer: str = "",
    deviations: Sequence[Mutant] = DEVIATIONS,
) -> Diagnosis:
    """Which deviations of the catalogue explain the wrong elements of a verdict.

    Args:
        name: the operation that was called.
        calls: each rank's arguments before the call, as the judge had them.
        verdict: the judge's, on what was returned.
        prefer: the rule that the case was aimed at; decides between deviations that explain the
            same elements.
        deviations: the mutants to try, of those that can change the operation.
    """
    item = operation(name)
    evidence = evidence_of(item, calls, verdict)
    search = _Search(evidence, prefer)
    nothing = Diagnosis((), 0, evidence.wrong, 0.0)
    if not evidence.wrong:
        return nothing
    singles = list(search.singles([each for each in deviations if item.name in each.operations]))
    best = search.best(singles) or nothing
    if best.explained < (1.0 - SECOND) * evidence.wrong:
        # Two at once: those that explain most, each with every other that explains anything.
        leads = sorted(singles, key=lambda found: -found.explained * found.precision)[:4]
        able = [found.deviations[0] for found in singles if found.explained]
        pairs = search.pairs([found.deviations[0] for found in leads if found.explained], able)
        both = search.best(list(pairs)) or nothing
        if both.explained - best.explained >= SECOND * evidence.wrong:
            best = both
    return best if best.share >= NAMED else nothing


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
