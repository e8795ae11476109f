"""vLLM's own ``moe_output`` functions, from the file of its wheel.

The file is run by itself: it imports torch alone, so neither the engine nor its compiled parts are
loaded, and a machine without a GPU will do. It is that of the installed ``vllm``, or else of what
the environment's ``MOETAIL_VLLM`` names: a wheel, or a folder in which one was unpacked.

Operations 1 and 2 map (``convert_flashinfer_moe_output``, ``route_major_moe_output``). What they
make comes back as :class:`moetail.spec.UnfinalizedMoEOutput`, field by field, without a copy.
"""

from __future__ import annotations

import sys
from dataclasses import MISSING, fields
from types import ModuleType
from typing import Any

from torch import Tensor

from moetail.conformance.adapters.sources import Source, find_source
from moetail.conformance.implementation import UsageError
from moetail.spec import MoEOutput, UnfinalizedMoEOutput
from moetail.spec.rules import (
    ALLREDUCE,
    BOUNDARY,
    FINALIZE,
    FUSED,
    GATHER,
    MOE_OUTPUT,
    WORKSPACE,
)

__all__ = [
    "NOT_MAPPED",
    "VERSIONS",
    "convert_flashinfer_moe_output",
    "route_major_moe_output",
]

NOT_MAPPED: dict[str, str] = {
    FINALIZE: "vLLM 0.33.0 holds no MegaMoE finalize",
    BOUNDARY: "its boundary (models/beam) needs both norms' weights and scales, and the engine",
    FUSED: "vLLM 0.33.0 holds no MegaMoE finalize",
    GATHER: "vLLM 0.33.0 holds no MegaMoE finalize",
    WORKSPACE: "its workspace needs the engine, NVLink multicast and vLLM's compiled operators",
    MOE_OUTPUT: "it finalizes only as a part of its all-reduce",
    ALLREDUCE: (
        "its all-reduce takes no shared output, and needs the engine, NVLink multicast and vLLM's "
        "compiled operators"
    ),
}


def _run(source: Source) -> ModuleType:
    module = ModuleType("_moetail_vllm_moe_output")
    module.__file__ = source.name
    sys.modules[module.__name__] = module  # dataclasses look their module up
    exec(compile(source.text, source.name, "exec", dont_inherit=True), vars(module))
    return module


def _shape(kind: Any) -> list[tuple[str, Any]]:
    return [(item.name, None if item.default is MISSING else item.default) for item in fields(kind)]


def _check_classes(module: ModuleType, release: str) -> None:
    """Names, order and defaults of the fields are part of the contract."""
    for kind in (UnfinalizedMoEOutput, MoEOutput):
        theirs = getattr(module, kind.__name__, None)
        found = None if theirs is None else _shape(theirs)
        if found != _shape(kind):
            raise UsageError(
                f"vllm {release}: {kind.__name__} has fields {found}; allowed: {_shape(kind)}"
            )


_SOURCE = find_source(
    "vllm",
    "vllm/model_executor/layers/fused_moe/moe_output.py",
    variable="MOETAIL_VLLM",
    known="0.33.0",
)
VERSIONS: dict[str, str] = {"vllm": _SOURCE.release}
_VLLM = _run(_SOURCE)
_check_classes(_VLLM, _SOURCE.release)


def _ours(value: Any) -> Any:
    """Their dataclass as the contract's, with the same tensors."""
    if type(value) is not _VLLM.UnfinalizedMoEOutput:
        return value
    names = [item.name for item in fields(UnfinalizedMoEOutput)]
    return UnfinalizedMoEOutput(*(getattr(value, name) for name in names))


def convert_flashinfer_moe_output(
    flashinfer_output: Any,
    *,
    do_finalize: bool,
    num_tokens: int,
    top_k: int,
    finalized_output: Tensor | None = None,
) -> Tensor | UnfinalizedMoEOutput:
    """See :meth:`moetail.spec.MoETail.convert_flashinfer_moe_output`."""
    made: Tensor | UnfinalizedMoEOutput = _ours(
        _VLLM.convert_flashinfer_moe_output(
            flashinfer_output,
            do_finalize=do_finalize,
            num_tokens=num_tokens,
            top_k=top_k,
            finalized_output=finalized_output,
        )
    )
    return made


def route_major_moe_output(
    routes: Tensor, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None
) -> UnfinalizedMoEOutput:
    """See :meth:`moetail.spec.MoETail.route_major_moe_output`."""
    made: UnfinalizedMoEOutput = _ours(
        _VLLM.route_major_moe_output(routes, topk_weights, topk_ids, expert_map)
    )
    return made
