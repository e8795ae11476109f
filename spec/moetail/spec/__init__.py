"""The contract: types, operations, arithmetic, rules, the API as a Protocol, argument checks."""

from moetail.spec import checks
from moetail.spec.api import MoETail, Workspace
from moetail.spec.contract import BEAM, Contract, Rounding, Step
from moetail.spec.errors import ContractError
from moetail.spec.operations import OPERATIONS, Argument, Operation, operation
from moetail.spec.ownership import owned_tokens, tokens_per_rank
from moetail.spec.rules import RULES, Kind, Rule, rule, rules_for
from moetail.spec.types import MoEOutput, UnfinalizedMoEOutput

__all__ = [
    "BEAM",
    "OPERATIONS",
    "RULES",
    "Argument",
    "Contract",
    "ContractError",
    "Kind",
    "MoEOutput",
    "MoETail",
    "Operation",
    "Rounding",
    "Rule",
    "Step",
    "UnfinalizedMoEOutput",
    "Workspace",
    "checks",
    "operation",
    "owned_tokens",
    "rule",
    "rules_for",
    "tokens_per_rank",
]
