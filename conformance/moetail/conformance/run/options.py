"""The words of a command line: which there are, and what they ask for.

The commands and the pytest plugin both take their options from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moetail.conformance.implementation import Implementation, UsageError, load
from moetail.conformance.run.check import TAIL
from moetail.conformance.run.plan import PROFILES, Plan
from moetail.conformance.run.results import only
from moetail.conformance.run.trial import Trial
from moetail.conformance.run.workspaces import makes_virtual
from moetail.spec import ContractError
from moetail.spec.rules import OPERATIONS, RULES, operation, rule

__all__ = ["OPTIONS", "Option", "Request", "make_plan", "operations_named", "rules_named"]


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        name: without dashes in front, such as "virtual-ranks".
        default: False for one that is given or not, () for one that may be repeated; else the text
            that stands where it is not given, None for nothing.
        help: what it is for.
        metavar: what stands for its value in a help text.
    """

    name: str
    default: str | bool | tuple[str, ...] | None
    help: str
    metavar: str = ""

    @property
    def key(self) -> str:
        """The name as an identifier."""
        return self.name.replace("-", "_")


_PLAN = Plan()

# Each rank is a process; and a case is made whole.
_MOST_RANKS = 256
_MOST_ELEMENTS = 1 << 36
_MOST_SECONDS = 24 * 60 * 60

OPTIONS: Mapping[str, Option] = {
    option.key: option
    for option in (
        Option(
            "impl",
            "reference",
            "reference, kernels, vllm, flashinfer, a module, module:attribute, or a .py file",
            "IMPL",
        ),
        Option("op", (), "Only this operation, by its name or column heading (repeatable)."),
        Option("rule", (), "Only this rule, or all of a kind, such as ROUND (repeatable)."),
        Option("device", None, "cpu or cuda; by default cuda for kernels where there is a GPU."),
        Option(
            "ranks",
            ",".join(map(str, _PLAN.ranks)),
            "Numbers of ranks for distributed operations.",
        ),
        Option(
            "virtual-ranks",
            False,
            "Run all ranks on one GPU, each on a stream of its own, with workspaces from the "
            "implementation's BeamAllReduceWorkspace.virtual.",
        ),
        Option("profile", _PLAN.profile, "quick, full or soak."),
        Option("case", None, "Only the trial of this id."),
        Option("seed", str(_PLAN.seed), "Shifts the seed of every case.", "INTEGER"),
        Option(
            "rank-timeout", f"{_PLAN.timeout:.0f}", "Seconds for one distributed call.", "INTEGER"
        ),
        Option("require-gpu", False, "Fail where there is no GPU."),
    )
}


@dataclass(frozen=True)
class Request:
    """What is to be judged, where, and how much of it.

    Attributes:
        implementation, plan: of the run.
        operations, rules: what it is restricted to; empty is everything.
        case: the one trial that is asked for, or None.
    """

    implementation: Implementation
    plan: Plan
    operations: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    case: Trial | None = None

    @classmethod
    def parse(cls, words: Mapping[str, Any]) -> Request:
        """From the values of ``OPTIONS`` by their keys; UsageError says what is allowed."""
        device = _device(words["device"], words["impl"], words["require_gpu"])
        implementation = load(words["impl"])
        plan = make_plan(
            profile=words["profile"],
            seed=words["seed"],
            ranks=words["ranks"],
            device=device,
            timeout=words["rank_timeout"],
            virtual_ranks=words["virtual_ranks"],
            implementation=implementation,
        )
        operations, rules = operations_named(words["op"]), rules_named(words["rule"])
        return cls(implementation, plan, operations, rules, _case(words["case"]))


def make_plan(
    *,
    profile: str = _PLAN.profile,
    seed: object = _PLAN.seed,
    ranks: str = str(OPTIONS["ranks"].default),
    device: str = _PLAN.device,
    timeout: object = int(_PLAN.timeout),
    virtual_ranks: bool = _PLAN.virtual_ranks,
    implementation: Implementation | None = None,
) -> Plan:
    """A plan from what was typed; UsageError names what is wrong and what is allowed.

    With an implementation it is also an error to ask for virtual ranks that it cannot make.
    """
    if profile not in PROFILES:
        raise UsageError(f"--profile: {profile!r}; allowed: {', '.join(PROFILES)}")
    sizes = sorted({_integer("--ranks", part, 1, _MOST_RANKS) for part in str(ranks).split(",")})
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
        seed=_integer("--seed", seed, 0, (1 << 63) - 1),
        ranks=tuple(sizes),
        device=device,
        timeout=float(_integer("--rank-timeout", timeout, 1, _MOST_SECONDS)),
        virtual_ranks=virtual_ranks,
        # Memory that GPUs share takes a hundred times as long to make as a call takes.
        keep_workspaces=device == "cuda",
    )


def operations_named(words: Iterable[str]) -> tuple[str, ...]:
    """Names of operations, also by their short names; comma-separated lists are taken apart."""
    named = []
    for word in _parts("--op", words):
        try:
            named.append(operation(word).name)
        except ContractError as error:
            raise UsageError(f"--op: {error.found}; allowed: {error.allowed}") from None
    return only(named, [item.name for item in OPERATIONS])


def rules_named(words: Iterable[str]) -> tuple[str, ...]:
    """Ids of rules; a kind such as ROUND stands for all of its rules."""
    named: list[str] = []
    for word in map(str.upper, _parts("--rule", words)):
        of_kind = [item.id for item in RULES if item.kind.value == word]
        if word == TAIL or of_kind:
            named += of_kind or [TAIL]
            continue
        try:
            named.append(rule(word).id)
        except ContractError as error:
            raise UsageError(f"--rule: {error.found}; allowed: {error.allowed}, {TAIL}") from None
    return only(named, [*(item.id for item in RULES), TAIL])


def _parts(name: str, words: Iterable[str]) -> Iterator[str]:
    for text in words:
        for part in text.split(","):
            if not part.strip():
                raise UsageError(f"{name}: {text!r}; allowed: names, with commas between")
            yield part.strip()


def _case(text: str | None) -> Trial | None:
    """The trial of that id."""
    if text is None:
        return None
    try:
        trial = Trial.parse(text)
    except ValueError as error:
        raise UsageError(f"--case: {error}") from None
    if trial.case.ranks > _MOST_RANKS or trial.case.elements > _MOST_ELEMENTS:
        raise UsageError(
            f"--case: {text!r}; allowed: at most {_MOST_RANKS} ranks and 2^36 elements"
        )
    return trial


def _device(device: str | None, impl: str, require_gpu: bool) -> str:
    import torch

    has_gpu = torch.cuda.is_available()
    if require_gpu and not has_gpu:
        raise UsageError("--require-gpu: torch finds no GPU here; allowed: a machine with one")
    if device:
        return device
    return "cuda" if has_gpu and (require_gpu or impl == "kernels") else "cpu"


def _integer(name: str, text: object, least: int, most: int) -> int:
    try:
        value = int(str(text))
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        shown = str(text) if len(str(text)) <= 40 else f"{str(text)[:40]}..."
        raise UsageError(f"{name}: {shown!r}; allowed: an integer >= {least} and <= {most}")
    return value
