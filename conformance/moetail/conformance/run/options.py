"""From the words of a command line to a plan, operations, rules and trials."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Sequence

from moetail.conformance.implementation import Implementation, UsageError
from moetail.conformance.run.check import CHECKS, TAIL, Check, all_trials
from moetail.conformance.run.plan import PROFILES, Plan
from moetail.conformance.run.precedence import precedence
from moetail.conformance.run.results import only
from moetail.conformance.run.trial import Trial
from moetail.conformance.run.workspaces import makes_virtual
from moetail.spec import ContractError
from moetail.spec.rules import OPERATIONS, RULES, operation, rule

__all__ = [
    "case_named",
    "load_checks",
    "make_plan",
    "operations_named",
    "rules_named",
    "trials_asked",
]


def _integer(name: str, text: object, least: int) -> int:
    try:
        value = int(str(text))
    except ValueError:
        value = least - 1
    if value < least:
        raise UsageError(f"{name}: {text!r}; allowed: an integer >= {least}")
    return value


def make_plan(
    *,
    profile: str = "quick",
    seed: object = 0,
    ranks: str = "1,2,3,4,8",
    device: str = "cpu",
    timeout: object = 60,
    virtual_ranks: bool = False,
    implementation: Implementation | None = None,
) -> Plan:
    """A plan from what was typed; UsageError names what is wrong and what is allowed.

    With an implementation it is also an error to ask for virtual ranks that it cannot make.
    """
    if profile not in PROFILES:
        raise UsageError(f"--profile: {profile!r}; allowed: {', '.join(PROFILES)}")
    sizes = sorted({_integer("--ranks", part, 1) for part in str(ranks).split(",")})
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UsageError("--device: 'cuda', but torch finds no GPU here; allowed: cpu")
    elif device != "cpu":
        raise UsageError(f"--device: {device!r}; allowed: cpu, cuda")
    if virtual_ranks and implementation is not None and not makes_virtual(implementation):
        raise UsageError(
            f"--virtual-ranks: {implementation.spec} has no BeamAllReduceWorkspace.virtual; "
            "allowed: an implementation with that classmethod, virtual(world_size, hidden_size, "
            "max_tokens, device), which returns one workspace for each rank"
        )
    return Plan(
        profile=profile,
        seed=_integer("--seed", seed, 0),
        ranks=tuple(sizes),
        device=device,
        timeout=float(_integer("--rank-timeout", timeout, 1)),
        virtual_ranks=virtual_ranks,
        # Memory that GPUs share takes a hundred times as long to make as a call takes.
        keep_workspaces=device == "cuda",
    )


def operations_named(words: Iterable[str]) -> tuple[str, ...]:
    """Names of operations, also by their short names; comma-separated lists are taken apart."""
    named = []
    for word in (part for text in words for part in text.split(",") if part):
        try:
            named.append(operation(word).name)
        except ContractError as error:
            raise UsageError(f"--op: {error.found}; allowed: {error.allowed}") from None
    return only(named, [item.name for item in OPERATIONS])


def rules_named(words: Iterable[str]) -> tuple[str, ...]:
    """Ids of rules; a kind such as ROUND stands for all of its rules."""
    named: list[str] = []
    for word in (part.upper() for text in words for part in text.split(",") if part):
        of_kind = [item.id for item in RULES if item.kind.value == word]
        if word == TAIL or of_kind:
            named += of_kind or [TAIL]
            continue
        try:
            named.append(rule(word).id)
        except ContractError as error:
            raise UsageError(f"--rule: {error.found}; allowed: {error.allowed}, {TAIL}") from None
    return only(named, [*(item.id for item in RULES), TAIL])


def case_named(text: str) -> Trial | None:
    """The trial of that id; None for ""."""
    if not text:
        return None
    try:
        return Trial.parse(text)
    except ValueError as error:
        raise UsageError(f"--case: {error}") from None


def load_checks() -> list[Check]:
    """Every check of the suite, in the order in which they are believed."""
    from moetail.conformance import suite

    for module in sorted(item.name for item in pkgutil.iter_modules(suite.__path__)):
        importlib.import_module(f"{suite.__name__}.{module}")
    return sorted(CHECKS, key=lambda check: precedence(check.name))


def trials_asked(
    check: Check,
    plan: Plan,
    provided: Sequence[str],
    *,
    operations: Sequence[str] = (),
    rules: Sequence[str] = (),
    case: str = "",
) -> list[Trial]:
    """The trials of a check that were asked for.

    A case that is named runs under the rules that are named with it, or else under the check of
    the whole subject.
    """
    if case and not rules:
        rules = (TAIL,)
    if rules and check.rule not in rules:
        return []
    trial = case_named(case)
    if trial is None:
        return list(all_trials(check, plan, provided, operations))
    if operations:
        trial = Trial(operations[0], trial.case, trial.variation)
    fits = check.varies is None or check.varies == bool(trial.variation)
    applies = trial.operation in check.operations and trial.operation in provided
    return [trial] if fits and applies else []
