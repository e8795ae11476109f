"""The contract: types, rules, the API as a Protocol, argument checks and token ownership."""

from moetail.spec import checks
from moetail.spec.api import MoETail, Workspace
from moetail.spec.errors import ContractError
from moetail.spec.ownership import owned_tokens, tokens_per_rank
from moetail.spec.rules import OPERATIONS, RULES, Kind, Operation, Rule, operation, rule, rules_for
from moetail.spec.types import MoEOutput, UnfinalizedMoEOutput

__all__ = [
    "OPERATIONS",
    "RULES",
    "ContractError",
    "Kind",
    "MoEOutput",
    "MoETail",
    "Operation",
    "Rule",
    "UnfinalizedMoEOutput",
    "Workspace",
    "checks",
    "operation",
    "owned_tokens",
    "rule",
    "rules_for",
    "tokens_per_rank",
]
