"""The rules as data.

Ids are stable and public: error messages, reports and tests refer to them. The statements are the
normative text; ``spec/CONTRACT.md`` is generated from them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from moetail.spec import operations
from moetail.spec.contract import BEAM
from moetail.spec.errors import ContractError
from moetail.spec.formulas import statement
from moetail.spec.operations import OPERATIONS, Operation, operation

__all__ = [
    "ALLREDUCE",
    "BOUNDARY",
    "CONVERT",
    "FINALIZE",
    "FUSED",
    "GATHER",
    "MOE_OUTPUT",
    "OPERATIONS",
    "ROUTE_MAJOR",
    "RULES",
    "WORKSPACE",
    "Kind",
    "Operation",
    "Rule",
    "operation",
    "rule",
    "rules_for",
]


class Kind(str, Enum):
    """What a rule is about. The value is the prefix of its ids."""

    PACK = "PACK"
    ROUTE = "ROUTE"
    CONVERT = "CONVERT"
    ROUND = "ROUND"
    LIVE = "LIVE"
    OWN = "OWN"
    DOMAIN = "DOMAIN"
    RUN = "RUN"

    @property
    def heading(self) -> str:
        return _KIND_HEADINGS[self]


_KIND_HEADINGS = {
    Kind.PACK: "how rows are packed",
    Kind.ROUTE: "which row a route means",
    Kind.CONVERT: "what a producer's return value may look like",
    Kind.ROUND: "where values are rounded",
    Kind.LIVE: "which slots are alive",
    Kind.OWN: "which rank owns which tokens",
    Kind.DOMAIN: "what is refused",
    Kind.RUN: "how an implementation behaves when it runs",
}


CONVERT = operations.CONVERT.name
ROUTE_MAJOR = operations.ROUTE_MAJOR.name
FINALIZE = operations.FINALIZE.name
BOUNDARY = operations.BOUNDARY.name
FUSED = operations.FUSED.name
GATHER = operations.GATHER.name
WORKSPACE = operations.WORKSPACE.name
MOE_OUTPUT = operations.MOE_OUTPUT.name
ALLREDUCE = operations.ALLREDUCE.name


def _names(applies: Callable[[Operation], bool]) -> tuple[str, ...]:
    return tuple(item.name for item in OPERATIONS if applies(item))


_REDUCING = _names(lambda item: item.reduces)
_BOUNDARIES = _names(lambda item: item.has_boundary)
_COMPUTING = _names(lambda item: item.computes)
_PERMUTED = _names(lambda item: item.permuted)
_CAPACITY = _names(lambda item: item.capacity)
_RANKS = _names(lambda item: item.computes and item.distributed)
_CONVERSIONS = (CONVERT, ROUTE_MAJOR)

_MOE_OUTPUT = "vLLM moe_output"
_BEAM = "vLLM Beam moe_finalize"
_RELEASED = "vLLM's released consumers and its peers' fixes"


@dataclass(frozen=True)
class Rule:
    """One rule of the contract.

    Attributes:
        id: such as ``"ROUND-2"``.
        statement: the normative sentence.
        operations: names of the operations it applies to, in the API's order.
        source: the public text it restates.
        derived: True where the rule is not in the two source texts but follows from released code
            and from fixes to it.
        breaks: what an implementation that breaks it typically does.
    """

    id: str
    statement: str
    operations: tuple[str, ...]
    source: str
    breaks: str
    derived: bool = False

    @property
    def kind(self) -> Kind:
        return Kind(self.id.split("-")[0])


RULES: tuple[Rule, ...] = (
    Rule(
        "PACK-1",
        "Rows are densely packed at H: rank 2 (or the operation's own shape) and contiguous. "
        "Anything else is refused.",
        _names(lambda item: any(one.layout == "PACK-1" for one in item.arguments)),
        _MOE_OUTPUT,
        "reads a strided or padded buffer as if it were dense",
    ),
    Rule(
        "PACK-2",
        "The row count and the contents of rows that no route maps to never change an output bit.",
        _PERMUTED,
        _MOE_OUTPUT,
        "derives a stride or a loop bound from the padded row count, or touches padding",
    ),
    Rule(
        "PACK-3",
        "Route-major output has row t * K + k for route (t, k): the map is the identity apart from "
        "its -1 slots, and there are T * K rows on every rank.",
        (ROUTE_MAJOR, MOE_OUTPUT, ALLREDUCE),
        _MOE_OUTPUT,
        "compacts the local rows, or maps remote routes to rows",
    ),
    Rule(
        "ROUTE-1",
        "A -1 route contributes exactly nothing, whatever its weight or any row holds.",
        _PERMUTED,
        _MOE_OUTPUT,
        "takes -1 as row 0 or as the last row, or multiplies a remote route by zero",
    ),
    Rule(
        "ROUTE-2",
        "Permuting the rows together with the map changes no bit.",
        _PERMUTED,
        _MOE_OUTPUT,
        "reduces in row order instead of in an order fixed by the routes",
    ),
    Rule(
        "ROUTE-3",
        "Routing weights are read in the dtype the tensor has: BF16, FP16 or FP32.",
        _PERMUTED,
        _MOE_OUTPUT,
        "reinterprets BF16 weights as FP32, or narrows FP32 weights to the activation dtype",
    ),
    Rule(
        "ROUTE-4",
        "A token with no local route reduces to zero, and its destination is written.",
        _PERMUTED,
        _MOE_OUTPUT,
        "skips tokens without work and leaves what the buffer held",
    ),
    Rule(
        "ROUTE-5",
        "NaN and infinity in live routes propagate as IEEE 754 says.",
        _REDUCING,
        _MOE_OUTPUT,
        "masks by multiplying, or replaces NaN to hide another fault",
    ),
    Rule(
        "CONVERT-1",
        "Every legal producer layout is accepted, zero tokens included.",
        _CONVERSIONS,
        _MOE_OUTPUT,
        "insists on one shape for the weights or the map",
    ),
    Rule(
        "CONVERT-2",
        "An illegal layout is refused with a ValueError that names what is wrong.",
        _CONVERSIONS,
        _MOE_OUTPUT,
        "takes top_k from a tensor's last dimension, or guesses",
    ),
    Rule(
        "CONVERT-3",
        "Nothing is copied: rows, weights, and a map the producer made alias the given storage.",
        _CONVERSIONS,
        _MOE_OUTPUT,
        "casts, clones or makes contiguous on the way",
    ),
    Rule(
        "CONVERT-4",
        "A destination that was handed to the producer is what comes back: same shape, dtype, "
        "device and data pointer.",
        (CONVERT,),
        _MOE_OUTPUT,
        "returns a tensor the caller did not provide",
    ),
    Rule(
        "ROUND-1",
        statement(BEAM, "ROUND-1"),
        _REDUCING,
        _BEAM,
        "rounds products or the running sum to BF16",
    ),
    Rule(
        "ROUND-2",
        statement(BEAM, "ROUND-2"),
        _REDUCING,
        _BEAM,
        "folds the scale into the FP32 sum, applies it twice, or forgets it",
    ),
    Rule(
        "ROUND-3",
        statement(BEAM, "ROUND-3"),
        _COMPUTING,
        _BEAM,
        "truncates, or rounds halves up or away from zero",
    ),
    Rule(
        "ROUND-4",
        statement(BEAM, "ROUND-4"),
        _names(lambda item: item.takes("post_eps")),
        _BEAM,
        "rounds before the affine multiply, or takes the mean over a padded width",
    ),
    Rule(
        "ROUND-5",
        statement(BEAM, "ROUND-5"),
        _BOUNDARIES,
        _BEAM,
        "keeps a product in FP32 into the add, or fuses it into an FMA",
    ),
    Rule(
        "ROUND-6",
        statement(BEAM, "ROUND-6"),
        _BOUNDARIES,
        _BEAM,
        "stores the rounded residual but normalizes the unrounded one",
    ),
    Rule(
        "ROUND-7",
        statement(BEAM, "ROUND-7"),
        _PERMUTED,
        _RELEASED,
        "scales the shared part too, or carries FP32 through the all-reduce into the residual add",
        derived=True,
    ),
    Rule(
        "LIVE-1",
        "Only live rows are read: slots past them, up to capacity, may hold anything.",
        _CAPACITY,
        _BEAM,
        "reduces capacity rows, and lets a NaN in padding reach live tokens",
    ),
    Rule(
        "LIVE-2",
        "Zero tokens give empty outputs of the right shape and dtype, and launch nothing.",
        _COMPUTING,
        _BEAM,
        "launches an empty grid, divides by zero, or returns the wrong shape",
    ),
    Rule(
        "OWN-1",
        "Rank r owns tokens [r * L, min((r + 1) * L, T)) with L = ceil(T / W): consecutive blocks, "
        "and the last ranks may own none.",
        (GATHER,),
        _BEAM,
        "divides rounding down, so that the last tokens belong to nobody, or deals round-robin",
    ),
    Rule(
        "OWN-2",
        "Capacity slots and the last ranks' padding contribute nothing.",
        (GATHER,),
        _BEAM,
        "gathers padding into the outputs",
    ),
    Rule(
        "OWN-3",
        "hidden and normalized are bit-identical on all ranks.",
        _RANKS,
        _BEAM,
        "sums in an order that depends on the rank",
    ),
    Rule(
        "OWN-4",
        "Every strategy conforms; None chooses oneshot up to moe_gather_oneshot_max_tokens, "
        "unfused from moe_gather_separate_norm_min_tokens on where that is set, twoshot between.",
        (GATHER, WORKSPACE),
        _BEAM,
        "gives one path other roundings than another, or ignores a threshold",
    ),
    Rule(
        "DOMAIN-1",
        "Arguments outside the domain are refused with an error that names the argument and what "
        "was found.",
        _names(lambda item: item.computes or item.distributed),
        _BEAM,
        "computes something for a shape or dtype it does not support",
    ),
    Rule(
        "DOMAIN-2",
        "A refusal changes nothing: the destination and every input keep their bits.",
        _COMPUTING,
        _BEAM,
        "checks after the destination was touched",
    ),
    Rule(
        "RUN-1",
        "The same inputs give the same bits, run after run.",
        _COMPUTING,
        _BEAM,
        "accumulates with atomics, or reads uninitialized memory",
    ),
    Rule(
        "RUN-2",
        "Inputs are not modified.",
        (*_CONVERSIONS, *_COMPUTING),
        _BEAM,
        "adds the residual in place, or scales the weights in place",
    ),
    Rule(
        "RUN-3",
        "Every element of every output is written; a given destination is filled and returned.",
        _COMPUTING,
        _BEAM,
        "leaves the last row or the tail of a row, or returns another tensor",
    ),
    Rule(
        "RUN-4",
        "Work runs on the current stream, and a captured graph replayed with changed inputs equals "
        "an eager call.",
        _COMPUTING,
        _BEAM,
        "keeps flags or copies from the call before",
    ),
    Rule(
        "RUN-5",
        "One workspace serves any sequence of sizes and strategies.",
        _RANKS,
        _BEAM,
        "sees rows of an earlier, larger call",
    ),
    Rule(
        "RUN-6",
        "Offsets past 2^31 elements are right.",
        _COMPUTING,
        _BEAM,
        "multiplies row by hidden size in 32 bits",
    ),
    Rule(
        "RUN-7",
        "Negative zeros in the payload neither hang nor corrupt a collective.",
        _RANKS,
        _BEAM,
        "uses -0.0 as the mark of a slot that has not arrived",
    ),
)

_RULES_BY_ID = {rule.id: rule for rule in RULES}


def rule(rule_id: str) -> Rule:
    """The rule of that id (any case); a ContractError that lists the ids where there is none."""
    try:
        return _RULES_BY_ID[rule_id.upper()]
    except KeyError:
        raise ContractError("DOMAIN-1", "rule", repr(rule_id), ", ".join(_RULES_BY_ID)) from None


def rules_for(name: str) -> tuple[Rule, ...]:
    """The rules that apply to the operation of that name, in the contract's order."""
    return tuple(item for item in RULES if operation(name).name in item.operations)
