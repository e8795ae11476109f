"""The operations as FlashInfer-Bench Definitions, with workloads.

A Definition describes one kernel interface: axes, input and output tensors with their dtypes, and
reference code with a function ``run`` that needs torch alone. It has no optional tensors, so an
operation with options has a Definition for each of two forms: the usual one, and the whole
"sandwich" (post-norm, scales of the residual add, next norm). Operations of several ranks take all
ranks' arguments stacked, and give what every rank ends with.

The reference code is not written here: it is the text of those stages of
:class:`moetail.reference.Stages` that ``run`` uses, and of the ``_run_*`` functions below.

FlashInfer-Bench compares with a tolerance, which passes the rounding mistakes that this project is
about (see the criteria that ``moetail criteria`` compares). A Definition says what a kernel takes
and gives; whether it conforms is for ``moetail check``.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from moetail.conformance.cases import MODELS, Case
from moetail.conformance.implementation import UsageError
from moetail.reference.stages import Stages
from moetail.spec import operation, owned_tokens, tokens_per_rank
from moetail.spec.rules import (
    ALLREDUCE,
    BOUNDARY,
    CONVERT,
    FINALIZE,
    FUSED,
    GATHER,
    MOE_OUTPUT,
    ROUTE_MAJOR,
    rules_for,
)

__all__ = [
    "FORMS",
    "OP_TYPE",
    "Form",
    "case_of",
    "definition",
    "reference_code",
    "values_of",
    "write_definitions",
]

OP_TYPE = "moe_tail"

Shape = tuple[str, ...]
Spec = tuple[Shape | None, str]

_T, _K, _H, _W = "num_tokens", "top_k", "hidden_size", "world_size"
_ROWS, _SLOTS = "num_rows", "num_slots"

_AXES = {
    _T: "T, tokens",
    _K: "K, routes of a token",
    _H: "H",
    _W: "W, ranks; tensors with this axis hold one part for each rank",
    _ROWS: "rows of the permuted expert results, padding included; unreferenced rows may be NaN",
    _SLOTS: "token slots, at least as many as there are tokens; the others may be NaN",
    "num_routes": "T * K",
    "num_experts": "E, experts of the layer",
}

_BF16, _FP32, _INT32 = "bfloat16", "float32", "int32"
_SCALAR: Spec = (None, _FP32)


# --- reference code -------------------------------------------------------------------------------
# What follows is written into the Definitions, so it uses nothing but torch and Stages.


def _run_convert(gemm2: Tensor, weights: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return gemm2, weights, index


def _run_route_major(
    routes: Tensor, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    index = torch.arange(topk_ids.numel(), dtype=torch.int32, device=routes.device)
    local = (topk_ids >= 0) & (expert_map[topk_ids.long().clamp(min=0)] >= 0)
    return routes, topk_weights, torch.where(local, index.view(topk_ids.shape), -1)


def _run_finalize(
    expert_outputs: Tensor,
    expert_weights: Tensor,
    routed_scale: float,
    post_weight: Tensor | None = None,
    post_eps: float | None = None,
) -> Tensor:
    stages = Stages()
    live, top_k = expert_weights.shape
    rows = expert_outputs[:live].flatten(0, 1)
    identity = torch.arange(live * top_k, device=rows.device).view(live, top_k)
    scaled = stages.finalize(rows, expert_weights, identity, routed_scale)
    return stages.post_norm(scaled, post_weight, post_eps)


def _run_boundary(
    x: Tensor,
    residual: Tensor,
    next_weight: Tensor,
    next_eps: float,
    post_weight: Tensor | None = None,
    post_eps: float | None = None,
    x_scale: float | None = None,
    r_scale: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    scales = None if x_scale is None or r_scale is None else (x_scale, r_scale)
    return Stages().boundary(x, residual, post_weight, post_eps, next_weight, next_eps, scales)


def _run_fused(
    expert_outputs: Tensor,
    expert_weights: Tensor,
    routed_scale: float,
    residual: Tensor,
    next_weight: Tensor,
    next_eps: float,
    post_weight: Tensor | None = None,
    post_eps: float | None = None,
    x_scale: float | None = None,
    r_scale: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    stages = Stages()
    live, top_k = expert_weights.shape
    rows = expert_outputs[:live].flatten(0, 1)
    identity = torch.arange(live * top_k, device=rows.device).view(live, top_k)
    x = stages.finalize(rows, expert_weights, identity, routed_scale)
    scales = None if x_scale is None or r_scale is None else (x_scale, r_scale)
    return stages.boundary(x, residual, post_weight, post_eps, next_weight, next_eps, scales)


def _run_gather(
    expert_outputs: Tensor,
    expert_weights: Tensor,
    routed_scale: float,
    residual: Tensor,
    next_weight: Tensor,
    next_eps: float,
    post_weight: Tensor | None = None,
    post_eps: float | None = None,
    x_scale: float | None = None,
    r_scale: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    stages = Stages()
    num_tokens, world_size = residual.shape[0], expert_outputs.shape[0]
    parts = []
    for rank in range(world_size):
        live, top_k = len(stages.owned(num_tokens, world_size, rank)), expert_weights.shape[2]
        rows = expert_outputs[rank, :live].flatten(0, 1)
        identity = torch.arange(live * top_k, device=rows.device).view(live, top_k)
        parts.append(stages.finalize(rows, expert_weights[rank, :live], identity, routed_scale))
    x = torch.cat(parts)
    scales = None if x_scale is None or r_scale is None else (x_scale, r_scale)
    return stages.boundary(x, residual, post_weight, post_eps, next_weight, next_eps, scales)


def _run_moe_output(
    gemm2_permuted: Tensor,
    expert_weights: Tensor,
    expanded_idx_to_permuted_idx: Tensor,
    routed_scaling_factor: float,
    shared_output: Tensor | None = None,
) -> Tensor:
    stages = Stages()
    scaled = stages.finalize(
        gemm2_permuted, expert_weights, expanded_idx_to_permuted_idx, routed_scaling_factor
    )
    return scaled if shared_output is None else stages.add_shared(scaled, shared_output)


def _run_allreduce(
    gemm2_permuted: Tensor,
    expert_weights: Tensor,
    expanded_idx_to_permuted_idx: Tensor,
    shared_output: Tensor,
    routed_scaling_factor: float,
    residual: Tensor,
    next_weight: Tensor,
    next_eps: float,
    post_weight: Tensor | None = None,
    post_eps: float | None = None,
    x_scale: float | None = None,
    r_scale: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    stages = Stages()
    parts = []
    for rank in range(gemm2_permuted.shape[0]):
        scaled = stages.finalize(
            gemm2_permuted[rank],
            expert_weights[rank],
            expanded_idx_to_permuted_idx[rank],
            routed_scaling_factor,
        )
        parts.append(stages.add_shared(scaled, shared_output[rank]))
    x = stages.sum_ranks(torch.stack(parts))
    scales = None if x_scale is None or r_scale is None else (x_scale, r_scale)
    return stages.boundary(x, residual, post_weight, post_eps, next_weight, next_eps, scales)


# --- interfaces -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """One interface of an operation.

    Attributes:
        operation: of the contract.
        suffix: of the Definition's name, "" for the usual form.
        run: the function that becomes ``run``.
        inputs, outputs: shape by axes (None for a number) and dtype, by name, in order.
        options: of the cases that its workloads are made from.
        constraints: between axes.
    """

    operation: str
    suffix: str
    run: Callable[..., Any]
    inputs: Mapping[str, Spec]
    outputs: Mapping[str, Spec]
    options: Mapping[str, Any]
    constraints: tuple[str, ...] = ()

    def name(self, top_k: int, hidden: int) -> str:
        """The Definition's name."""
        routes = "" if self.operation == BOUNDARY else f"_k{top_k}"
        return f"{self.operation}{self.suffix}{routes}_h{hidden}"


_ROUTES: dict[str, Spec] = {
    "gemm2_permuted": ((_ROWS, _H), _BF16),
    "expert_weights": ((_T, _K), _FP32),
    "expanded_idx_to_permuted_idx": ((_T, _K), _INT32),
}
_CAPACITY: dict[str, Spec] = {
    "expert_outputs": ((_SLOTS, _K, _H), _BF16),
    "expert_weights": ((_T, _K), _FP32),
    "routed_scale": _SCALAR,
}
_NEXT: dict[str, Spec] = {
    "residual": ((_T, _H), _BF16),
    "next_weight": ((_H,), _BF16),
    "next_eps": _SCALAR,
}
_POST: dict[str, Spec] = {"post_weight": ((_H,), _BF16), "post_eps": _SCALAR}
_SANDWICH: dict[str, Spec] = {**_NEXT, **_POST, "x_scale": _SCALAR, "r_scale": _SCALAR}
_OUTPUT: dict[str, Spec] = {"output": ((_T, _H), _BF16)}
_PAIR: dict[str, Spec] = {"hidden": ((_T, _H), _BF16), "normalized": ((_T, _H), _BF16)}
_ENOUGH = (f"{_SLOTS} >= {_T}",)


def _by_rank(
    inputs: Mapping[str, Spec], rename: Mapping[str, str] | None = None
) -> dict[str, Spec]:
    """The tensors of all ranks, stacked; numbers are the same on every rank."""
    names = rename or {}
    return {
        name: (None if shape is None else (_W, *(names.get(axis, axis) for axis in shape)), dtype)
        for name, (shape, dtype) in inputs.items()
    }


def _boundary_forms(
    name: str,
    run: Callable[..., Any],
    before: Mapping[str, Spec],
    options: Mapping[str, Any],
    constraints: tuple[str, ...] = (),
) -> Iterator[Form]:
    tails: tuple[tuple[str, Mapping[str, Spec], dict[str, Any]], ...] = (
        ("", _NEXT, {"next": "affine"}),
        (
            "_sandwich",
            _SANDWICH,
            {"next": "affine", "post": "affine", "scales": (0.5, 0.75), "post_eps": 1e-5},
        ),
    )
    for suffix, tail, more in tails:
        inputs = {**before, **tail}
        yield Form(name, suffix, run, inputs, _PAIR, {**options, **more}, constraints)


def _forms() -> Iterator[Form]:
    views: dict[str, Spec] = {
        "gemm2": _ROUTES["gemm2_permuted"],
        "weights": _ROUTES["expert_weights"],
        "index": _ROUTES["expanded_idx_to_permuted_idx"],
    }
    yield Form(CONVERT, "", _run_convert, views, _ROUTES, {})
    routes: dict[str, Spec] = {
        "routes": (("num_routes", _H), _BF16),
        "topk_weights": ((_T, _K), _FP32),
        "topk_ids": ((_T, _K), _INT32),
        "expert_map": (("num_experts",), _INT32),
    }
    made = {**_ROUTES, "gemm2_permuted": routes["routes"]}
    constraints = (f"num_routes == {_T} * {_K}",)
    yield Form(ROUTE_MAJOR, "", _run_route_major, routes, made, {"local": 0.5}, constraints)

    scaled = {"capacity": 1, "routed_scale": 2.5}
    yield Form(FINALIZE, "", _run_finalize, _CAPACITY, _OUTPUT, scaled, _ENOUGH)
    normed = {**scaled, "post": "affine"}
    inputs = {**_CAPACITY, **_POST}
    yield Form(FINALIZE, "_post_norm", _run_finalize, inputs, _OUTPUT, normed, _ENOUGH)

    yield from _boundary_forms(BOUNDARY, _run_boundary, {"x": ((_T, _H), _BF16)}, {})
    yield from _boundary_forms(FUSED, _run_fused, _CAPACITY, scaled, _ENOUGH)
    slots = _by_rank(_CAPACITY, {_T: _SLOTS})
    constraints = (f"{_SLOTS} * {_W} >= {_T}",)
    options = {**scaled, "ranks": 3}
    yield from _boundary_forms(GATHER, _run_gather, slots, options, constraints)

    factor: dict[str, Spec] = {"routed_scaling_factor": _SCALAR}
    shared: dict[str, Spec] = {"shared_output": ((_T, _H), _BF16)}
    options = {"routed_scale": 2.5, "local": 0.5}
    yield Form(MOE_OUTPUT, "", _run_moe_output, {**_ROUTES, **factor}, _OUTPUT, options)
    inputs = {**_ROUTES, **factor, **shared}
    options = {**options, "shared": True}
    yield Form(MOE_OUTPUT, "_shared", _run_moe_output, inputs, _OUTPUT, options)
    before = {**_by_rank({**_ROUTES, **shared}), **factor}
    options = {"routed_scale": 2.5, "ranks": 3, "shared": True}
    yield from _boundary_forms(ALLREDUCE, _run_allreduce, before, options)


FORMS: tuple[Form, ...] = tuple(_forms())


# --- Definitions ----------------------------------------------------------------------------------


def definition(form: Form, *, top_k: int, hidden: int, experts: int) -> dict[str, Any]:
    """The Definition as JSON; K, H and E are constants of it, all other axes vary."""
    constants = {_K: top_k, _H: hidden, "num_experts": experts}
    used = [
        axis for shape, _ in (*form.inputs.values(), *form.outputs.values()) for axis in shape or ()
    ]
    axes: dict[str, Any] = {}
    for axis in dict.fromkeys(used):
        kind = {"type": "const", "value": constants[axis]} if axis in constants else {"type": "var"}
        axes[axis] = {**kind, "description": _AXES[axis]}
    info = operation(form.operation)
    rules = [rule.id for rule in rules_for(form.operation)]
    return {
        "name": form.name(top_k, hidden),
        "op_type": OP_TYPE,
        "description": (
            f"{info.name}: {info.summary}. Rounding points are part of the contract (rules "
            f"{', '.join(rules)}); a tolerance does not decide them."
        ),
        "tags": ["status:reference", f"moetail:{info.name}"],
        "axes": axes,
        "constraints": list(form.constraints),
        "inputs": _tensors(form.inputs),
        "outputs": _tensors(form.outputs),
        "reference": reference_code(form),
    }


def _tensors(specs: Mapping[str, Spec]) -> dict[str, Any]:
    return {
        name: {"shape": None if shape is None else list(shape), "dtype": dtype}
        for name, (shape, dtype) in specs.items()
    }


_CONTRACT_ERROR = '''class ContractError(ValueError):
    """An argument is outside the contract."""
'''


def reference_code(form: Form) -> str:
    """Python that needs torch alone, with a function ``run``: only the stages that it uses.

    Annotations are evaluated, and ``run`` has exactly the form's inputs, since FlashInfer-Bench
    looks at both.
    """
    run = _run_code(form)
    used = _stages_used(run)
    parts = ["import torch\nfrom torch import Tensor\n"]
    if "owned" in used:
        ownership = [inspect.getsource(item) for item in (tokens_per_rank, owned_tokens)]
        parts += [_CONTRACT_ERROR, *ownership]
    if used:
        methods = [inspect.getsource(item) for name, item in vars(Stages).items() if name in used]
        doc = '    """The arithmetic of the contract, one small function a stage."""\n'
        parts.append("class Stages:\n" + "\n".join([doc, *methods]))
    return "\n\n".join([*parts, run])


def _run_code(form: Form) -> str:
    """The function as ``run`` of the form's inputs; options that it has not are None."""
    text = inspect.getsource(form.run)
    (function,) = ast.parse(text).body
    assert isinstance(function, ast.FunctionDef)
    body = text.splitlines()[function.body[0].lineno - 1 :]
    missing = [one.arg for one in function.args.args if one.arg not in form.inputs]
    if missing:
        body.insert(0, f"    {' = '.join(missing)} = None")
    parameters = [
        f"    {name}: {'float' if shape is None else 'Tensor'},"
        for name, (shape, _) in form.inputs.items()
    ]
    made = ", ".join(["Tensor"] * len(form.outputs))
    result = made if len(form.outputs) == 1 else f"tuple[{made}]"
    return "\n".join(["def run(", *parameters, f") -> {result}:", *body]) + "\n"


def _stages_used(text: str) -> set[str]:
    """Names of the stages that the code calls, and of those that they call."""
    used: set[str] = set()
    todo = [text]
    while todo:
        for node in ast.walk(ast.parse(textwrap.dedent(todo.pop()))):
            if isinstance(node, ast.Attribute) and node.attr in vars(Stages):
                owner = node.value
                ours = isinstance(owner, ast.Name) and owner.id in ("self", "stages")
                ours |= isinstance(owner, ast.Call) and ast.unparse(owner) == "Stages()"
                if ours and node.attr not in used:
                    used.add(node.attr)
                    todo.append(inspect.getsource(getattr(Stages, node.attr)))
    return used


# --- workloads ------------------------------------------------------------------------------------


def case_of(form: Form, *, tokens: int, top_k: int, hidden: int, **options: Any) -> Case:
    """A case whose arguments fit the form."""
    routes = 1 if form.operation == BOUNDARY else top_k
    settings = {**form.options, **options}
    return Case(form.operation, tokens=tokens, top_k=routes, hidden=hidden, **settings)


def values_of(form: Form, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The form's inputs, in order, from the arguments of each rank's call."""
    call = calls[0]
    values: dict[str, Any] = dict(call)
    if call.get("scales") is not None:
        values["x_scale"], values["r_scale"] = call["scales"]
    if form.operation == CONVERT:
        values.update(zip(("gemm2", "weights", "index"), call["flashinfer_output"], strict=True))
    elif form.operation == ROUTE_MAJOR:
        values["routes"] = call["routes"].reshape(-1, call["routes"].shape[-1])
    elif form.operation == FINALIZE:
        values["expert_weights"] = call["expert_weights"][: call["output"].shape[0]]
    elif form.operation == FUSED:
        values["expert_outputs"] = _slots(call["x"])
        values["expert_weights"] = call["x"].expert_weights[: call["residual"].shape[0]]
    elif form.operation == GATHER:
        values["expert_outputs"] = torch.stack([_slots(one["x"]) for one in calls])
        values["expert_weights"] = torch.stack([one["x"].expert_weights for one in calls])
    elif form.operation in (MOE_OUTPUT, ALLREDUCE):
        values.update(_outputs(form, [one["x"] for one in calls]))
    return {name: values[name] for name in form.inputs}


def _slots(x: Any) -> Tensor:
    rows: Tensor = x.gemm2_permuted
    return rows.view(-1, x.expert_weights.shape[1], rows.shape[1])


def _outputs(form: Form, parts: Sequence[Any]) -> dict[str, Any]:
    values: dict[str, Any] = {"routed_scaling_factor": parts[0].routed_scaling_factor}
    most = max(part.routed.gemm2_permuted.shape[0] for part in parts)
    for name in _ROUTES:
        tensors = [getattr(part.routed, name) for part in parts]
        if name == "gemm2_permuted":  # ranks have more and fewer rows: padding means nothing
            tensors = [_padded(rows, most) for rows in tensors]
        values[name] = torch.stack(tensors) if form.operation == ALLREDUCE else tensors[0]
    if parts[0].shared_output is not None:
        tensors = [part.shared_output for part in parts]
        values["shared_output"] = (
            torch.stack(tensors) if form.operation == ALLREDUCE else tensors[0]
        )
    return values


def _padded(rows: Tensor, most: int) -> Tensor:
    padding = rows.new_full((most - rows.shape[0], rows.shape[1]), float("nan"))
    return torch.cat([rows, padding])


def workload(form: Form, name: str, case: Case, folder: Path) -> dict[str, Any]:
    """A workload trace as JSON; the case's tensors are written below ``folder``."""
    values = values_of(form, [case.arguments(rank) for rank in range(case.ranks)])
    key = str(uuid.uuid5(uuid.NAMESPACE_URL, f"moetail/{name}/{case.id}"))
    blob = Path("blob", "workloads", OP_TYPE, name, f"{key}.safetensors")
    tensors = {one: value for one, value in values.items() if isinstance(value, Tensor)}
    (folder / blob).parent.mkdir(parents=True, exist_ok=True)
    save_file(
        {one: value.contiguous().clone() for one, value in tensors.items()},
        folder / blob,
        {"moetail_case": case.id},
    )
    axes: dict[str, int] = {}
    inputs: dict[str, Any] = {}
    for one, (shape, _) in form.inputs.items():
        if shape is None:
            inputs[one] = {"type": "scalar", "value": float(values[one])}
            continue
        axes.update(zip(shape, values[one].shape, strict=True))
        inputs[one] = {"type": "safetensors", "path": str(blob), "tensor_key": one}
    for constant in (_K, _H, "num_experts"):
        axes.pop(constant, None)
    return {
        "definition": name,
        "workload": {"axes": axes, "inputs": inputs, "uuid": key},
        "solution": None,
        "evaluation": None,
    }


def write_definitions(
    folder: Path,
    *,
    model: str = "deepseek-v3",
    tokens: Sequence[int] = (1, 16),
    after: Callable[[str], None] = lambda name: None,
) -> list[Path]:
    """Write a FlashInfer-Bench trace set: definitions, workloads and their tensors.

    Args:
        folder: made if need be.
        model: whose dimensions and routing, a key of MODELS.
        tokens: T of the workloads of each Definition.
        after: is told of each Definition that is written.

    Returns:
        The Definitions' files.

    Raises:
        UsageError: no such model, or one outside the operations' domain.
    """
    known = [name for name, one in MODELS.items() if one.in_domain]
    if model not in known:
        raise UsageError(f"--model: {model!r}; allowed: {', '.join(known)}")
    chosen = MODELS[model]
    sizes = {"top_k": chosen.top_k, "hidden": chosen.hidden}
    written = []
    for form in FORMS:
        content = definition(form, experts=chosen.experts, **sizes)
        name = content["name"]
        path = folder / "definitions" / OP_TYPE / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        source: dict[str, Any] = {"source": "moe", "model": model}
        if form.operation == BOUNDARY:  # no routes, so no layer
            source = {"source": "normal"}
        lines = [
            json.dumps(workload(form, name, case_of(form, tokens=one, **sizes, **source), folder))
            for one in tokens
        ]
        loads = folder / "workloads" / OP_TYPE / f"{name}.jsonl"
        loads.parent.mkdir(parents=True, exist_ok=True)
        loads.write_text("\n".join(lines) + "\n", encoding="utf-8")
        written.append(path)
        after(name)
    return written
