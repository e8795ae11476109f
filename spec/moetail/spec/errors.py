"""The one error of the contract."""

from __future__ import annotations

__all__ = ["ContractError"]


class ContractError(ValueError):
    """An argument is outside the contract. It is raised before anything has changed (DOMAIN-2).

    Attributes:
        rule: id of the rule that refuses, such as ``"DOMAIN-1"``.
        argument: name of the argument as the API spells it.
        found: what was passed, in words.
        allowed: what the contract allows, in words.
    """

    def __init__(self, rule: str, argument: str, found: str, allowed: str) -> None:
        super().__init__(f"[{rule}] {argument}: found {found}; allowed: {allowed}")
        self.rule = rule
        self.argument = argument
        self.found = found
        self.allowed = allowed

    def __reduce__(self) -> tuple[type[ContractError], tuple[str, str, str, str]]:
        # The default pickles only the message, and rank processes send errors to their parent.
        return type(self), (self.rule, self.argument, self.found, self.allowed)
