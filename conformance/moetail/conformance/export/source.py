"""An operation as straight-line torch code, from the steps of a contract."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import reduce

from moetail.spec import BEAM, Contract, Operation, Rounding, Step
from moetail.spec.contract import OPS
from moetail.spec.formulas import formula

__all__ = ["torch_code"]

# What makes rows, weights and the map of some tokens' routes of a call's arguments:
_ARRANGED: Mapping[str, tuple[str, ...]] = {
    # one rank's, under any map;
    "routes": ("rows, weights, index = {rows}, {weights}, {map}",),
    # one rank's live slots, under the identity map;
    "slots": (
        "rows, weights = {rows}[: {weights}.shape[0]].flatten(0, 1), {weights}",
        "index = torch.arange(rows.shape[0], device=rows.device).view(weights.shape)",
    ),
    # all ranks' live slots, of which each has ceil(T / W), as far as there are tokens;
    "slots of ranks": (
        "owned = -(-{residual}.shape[0] // {rows}.shape[0])",
        "rows = {rows}[:, :owned].flatten(0, 1)[: {residual}.shape[0]].flatten(0, 1)",
        "weights = {weights}[:, :owned].flatten(0, 1)[: {residual}.shape[0]]",
        "index = torch.arange(rows.shape[0], device=rows.device).view(weights.shape)",
    ),
    # all ranks', and their shared parts, as if they were those of so many more tokens.
    "routes of ranks": (
        "ranks, num_rows = {rows}.shape[:2]",
        "rows, weights = {rows}.flatten(0, 1), {weights}.flatten(0, 1)",
        "index = {map}",
        "first = num_rows * torch.arange(ranks, device=index.device).view(ranks, 1, 1)",
        "index = torch.where(index < 0, -1, index + first).flatten(0, 1)",
        "shared_output = {shared_output}.flatten(0, 1)",
    ),
}

# Statements of an op, and last the expression of its value.
_OPS: Mapping[str, tuple[str, ...]] = {
    "weighted_sum": (
        "{name} = torch.zeros(({2}.shape[0], {0}.shape[1]), device={0}.device)",
        "for k in range({2}.shape[1]):",
        "    live = ({2}[:, k] >= 0).nonzero().squeeze(1)",
        "    {name}[live] += {1}[live, k, None].float() * {0}[{2}[live, k].long()].float()",
        "{name}",
    ),
    "sum_ranks": (
        "{name} = torch.zeros(({0}.shape[0] // ranks, {0}.shape[1]), device={0}.device)",
        "for part in {0}.chunk(ranks):",
        "    {name} += part.float()",
        "{name}",
    ),
    "multiply": ("{0}.float() * {1}",),
    "add": ("{0}.float() + {1}.float()",),
    "inverse_rms": ("1.0 / torch.sqrt({0}.float().square().mean(-1, keepdim=True) + {1})",),
    "affine": ("{0}.float() * {1} * {2}.float()",),
    "round": ("{0}",),
}
_DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}
_VARIABLES = {"round": "rounded", "sum": "total"}  # not the names of Python's functions


def torch_code(
    item: Operation, arguments: Mapping[str, str], contract: Contract = BEAM
) -> list[str]:
    """Statements that compute the operation's outputs; the last one returns them.

    Args:
        item: tensors of a distributed one have an axis more in front, the ranks'.
        arguments: the variable of each argument that is given, by role, as steps take it.
        contract: whose roundings are conversions of torch, and whose ops are the usual ones.

    Raises:
        ValueError: it has a step that is not so.
    """
    names, lines = dict(arguments), []
    if item.reduces:
        kind = ("slots" if item.capacity else "routes") + " of ranks" * item.distributed
        lines = [line.format(**names) for line in _ARRANGED[kind]]
        names |= {"rows": "rows", "weights": "weights", "map": "index"}
    absent = [
        step.name
        for step in contract.steps
        if step.stage not in item.stages or (step.needs and step.needs not in names)
    ]
    present = reduce(Contract.without, absent, contract)
    names |= {step.name: _VARIABLES.get(step.name, step.name) for step in present.steps}
    for stage in present.stages:
        lines.append(f"# {formula(present, stage)}")
        for step in present.steps:
            lines += _statements(step, names) if step.stage == stage else []
    made = [names[_left(contract, absent, output.step)] for output in item.outputs]
    return [*lines, f"return {', '.join(made)}"]


def _statements(step: Step, names: Mapping[str, str]) -> list[str]:
    rounding = step.rounds
    plain = rounding is None or rounding == Rounding(rounding.format)
    if step.how != OPS[step.op] or not plain:
        raise ValueError(f"step {step.name}: torch has no expression for {step}")
    name = names[step.name]
    values = [names[argument] for argument in step.args]
    *lines, value = (line.format(*values, name=name) for line in _OPS[step.op])
    if rounding is not None:
        whole = value if value.isidentifier() else f"({value})"
        value = f"{whole}.to({_DTYPES[rounding.format]})"
    return lines if value == name else [*lines, f"{name} = {value}"]


def _left(contract: Contract, absent: Collection[str], name: str) -> str:
    """The step whose value is there in place of an absent one's."""
    while name in absent:
        name = contract.step(name).args[0]
    return name
