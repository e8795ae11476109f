"""The operations as FlashInfer-Bench Definitions, with workloads.

A Definition describes one kernel interface: axes, input and output tensors with their dtypes, and
reference code with a function ``run`` that needs torch alone. It has no optional tensors, so an
operation with options has a Definition for each of two forms: the usual one, and the whole
"sandwich" (post-norm, scales of the residual add, next norm). Operations of several ranks take all
ranks' arguments stacked, and give what every rank ends with.

The reference code is generated from the contract's steps.

FlashInfer-Bench compares with a tolerance, which passes the rounding mistakes that this project is
about (see the criteria that ``moetail mutants --compare`` compares). A Definition says what a
kernel takes and gives; whether it conforms is for ``moetail check``.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from moetail.conformance.cases import MODELS, Case
from moetail.conformance.export.source import torch_code
from moetail.conformance.implementation import UsageError
from moetail.spec import Operation, operation
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


# --- interfaces -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """One interface of an operation.

    Attributes:
        operation: of the contract.
        suffix: of the Definition's name, "" for the usual form.
        code: the statements of ``run``, of an operation that does not compute.
        inputs, outputs: shape by axes (None for a number) and dtype, by name, in order.
        options: of the cases that its workloads are made from.
        constraints: between axes.
    """

    operation: str
    suffix: str
    inputs: Mapping[str, Spec]
    outputs: Mapping[str, Spec]
    options: Mapping[str, Any]
    constraints: tuple[str, ...] = ()
    code: tuple[str, ...] = ()

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
        yield Form(name, suffix, inputs, _PAIR, {**options, **more}, constraints)


def _forms() -> Iterator[Form]:
    views: dict[str, Spec] = {
        "gemm2": _ROUTES["gemm2_permuted"],
        "weights": _ROUTES["expert_weights"],
        "index": _ROUTES["expanded_idx_to_permuted_idx"],
    }
    yield Form(CONVERT, "", views, _ROUTES, {}, code=("return gemm2, weights, index",))
    routes: dict[str, Spec] = {
        "routes": (("num_routes", _H), _BF16),
        "topk_weights": ((_T, _K), _FP32),
        "topk_ids": ((_T, _K), _INT32),
        "expert_map": (("num_experts",), _INT32),
    }
    made = {**_ROUTES, "gemm2_permuted": routes["routes"]}
    constraints = (f"num_routes == {_T} * {_K}",)
    code = (
        "index = torch.arange(topk_ids.numel(), dtype=torch.int32, device=routes.device)",
        "local = (topk_ids >= 0) & (expert_map[topk_ids.long().clamp(min=0)] >= 0)",
        "return routes, topk_weights, torch.where(local, index.view(topk_ids.shape), -1)",
    )
    yield Form(ROUTE_MAJOR, "", routes, made, {"local": 0.5}, constraints, code)

    scaled = {"capacity": 1, "routed_scale": 2.5}
    yield Form(FINALIZE, "", _CAPACITY, _OUTPUT, scaled, _ENOUGH)
    normed = {**scaled, "post": "affine"}
    inputs = {**_CAPACITY, **_POST}
    yield Form(FINALIZE, "_post_norm", inputs, _OUTPUT, normed, _ENOUGH)

    yield from _boundary_forms(BOUNDARY, {"x": ((_T, _H), _BF16)}, {})
    yield from _boundary_forms(FUSED, _CAPACITY, scaled, _ENOUGH)
    slots = _by_rank(_CAPACITY, {_T: _SLOTS})
    constraints = (f"{_SLOTS} * {_W} >= {_T}",)
    options = {**scaled, "ranks": 3}
    yield from _boundary_forms(GATHER, slots, options, constraints)

    factor: dict[str, Spec] = {"routed_scaling_factor": _SCALAR}
    shared: dict[str, Spec] = {"shared_output": ((_T, _H), _BF16)}
    options = {"routed_scale": 2.5, "local": 0.5}
    yield Form(MOE_OUTPUT, "", {**_ROUTES, **factor}, _OUTPUT, options)
    inputs = {**_ROUTES, **factor, **shared}
    options = {**options, "shared": True}
    yield Form(MOE_OUTPUT, "_shared", inputs, _OUTPUT, options)
    before = {**_by_rank({**_ROUTES, **shared}), **factor}
    options = {"routed_scale": 2.5, "ranks": 3, "shared": True}
    yield from _boundary_forms(ALLREDUCE, before, options)


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


# What steps call the inputs that have other names here.
_ROLES = {
    "x": "rows",
    "expert_outputs": "rows",
    "gemm2_permuted": "rows",
    "expert_weights": "weights",
    "expanded_idx_to_permuted_idx": "map",
    "routed_scaling_factor": "routed_scale",
}


def reference_code(form: Form) -> str:
    """Python that needs torch alone, with a function ``run`` from the contract's steps.

    Annotations are evaluated, and ``run`` has exactly the form's inputs, since FlashInfer-Bench
    looks at both.
    """
    parameters = [
        f"    {name}: {'float' if shape is None else 'Tensor'},"
        for name, (shape, _) in form.inputs.items()
    ]
    arguments = {_ROLES.get(name, name): name for name in form.inputs}
    code = form.code or torch_code(operation(form.operation), arguments)
    made = ", ".join(["Tensor"] * len(form.outputs))
    result = made if len(form.outputs) == 1 else f"tuple[{made}]"
    head = ["import torch", "from torch import Tensor", "", "", "def run(", *parameters]
    return "\n".join([*head, f") -> {result}:", *(f"    {line}" for line in code)]) + "\n"


# --- workloads ------------------------------------------------------------------------------------


def case_of(form: Form, *, tokens: int, top_k: int, hidden: int, **options: Any) -> Case:
    """A case whose arguments fit the form."""
    routes = 1 if form.operation == BOUNDARY else top_k
    settings = {**form.options, **options}
    return Case(form.operation, tokens=tokens, top_k=routes, hidden=hidden, **settings)


def values_of(form: Form, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The form's inputs, in order, from the arguments of each rank's call."""
    item = operation(form.operation)
    by_rank = [_inputs(form, item, call) if item.computes else _parts(call) for call in calls]
    return {
        name: _stacked([values[name] for values in by_rank])
        if shape is not None and shape[0] == _W
        else by_rank[0][name]
        for name, (shape, _) in form.inputs.items()
    }


def _inputs(form: Form, item: Operation, call: Mapping[str, Any]) -> dict[str, Any]:
    """What one rank's call has of the form's inputs."""
    values = item.values(call)
    if item.capacity:
        top_k = values["weights"].shape[1]
        values["rows"] = values["rows"].view(-1, top_k, values["rows"].shape[-1])
        if not item.distributed:
            values["weights"] = values["weights"][: item.argument(item.counts).of(call).shape[0]]
    return {name: values[_ROLES.get(name, name)] for name in form.inputs}


def _parts(call: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of an operation that does not compute."""
    if "routes" in call:
        return {**call, "routes": call["routes"].reshape(-1, call["routes"].shape[-1])}
    return dict(zip(("gemm2", "weights", "index"), call["flashinfer_output"], strict=True))


def _stacked(tensors: list[Tensor]) -> Tensor:
    """One tensor of all ranks; they have more and fewer rows, and padding means nothing."""
    padding = float("nan") if tensors[0].is_floating_point() else 0
    return pad_sequence(tensors, batch_first=True, padding_value=padding)


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
