"""vLLM's own ``moe_output`` functions, from the file of its wheel.

The file is run by itself: it imports torch alone, so neither the engine nor its compiled parts are
loaded, and a machine without a GPU will do. It is that of the installed ``vllm``, or else of what
the environment's ``MOETAIL_VLLM`` names: a wheel, or a folder in which one was unpacked.

Operations 1 and 2 map (``convert_flashinfer_moe_output``, ``route_major_moe_output``). What they
make comes back as :class:`moetail.spec.UnfinalizedMoEOutput`, field by field, without a copy.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import zipfile
from dataclasses import MISSING, fields
from email.parser import HeaderParser
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

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

FILE = "vllm/model_executor/layers/fused_moe/moe_output.py"
VARIABLE = "MOETAIL_VLLM"
_ALLOWED = (
    f"vllm 0.33.0 or newer, installed with pip, or a wheel of it (or a folder where one was "
    f"unpacked) named by the environment's {VARIABLE}"
)

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


def _found() -> tuple[str, str, str]:
    """(name, source text, version) of vLLM's file."""
    named = os.environ.get(VARIABLE)
    if named:
        path = Path(named).expanduser()
        if path.is_dir():
            return _in_folder(path, None)
        if zipfile.is_zipfile(path):
            return _in_wheel(path)
        raise UsageError(f"{VARIABLE}: {path} is no folder and no wheel; allowed: {_ALLOWED}")
    # Of a top-level package, this looks for its folder and imports nothing.
    spec = importlib.util.find_spec("vllm")
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    if not places:
        raise UsageError(f"vllm is not installed; allowed: {_ALLOWED}")
    try:
        installed = version("vllm")
    except PackageNotFoundError:
        installed = "unknown"
    return _in_folder(Path(places[0]).parent, installed)


def _in_folder(folder: Path, release: str | None) -> tuple[str, str, str]:
    file = folder / FILE
    if release is None:
        texts = [
            item.read_text(encoding="utf-8") for item in folder.glob("vllm-*.dist-info/METADATA")
        ]
        release = _release(texts)
    if not file.is_file():
        raise UsageError(f"vllm {release} has no {FILE}; allowed: {_ALLOWED}")
    return str(file), file.read_text(encoding="utf-8"), release


def _in_wheel(wheel: Path) -> tuple[str, str, str]:
    with zipfile.ZipFile(wheel) as opened:
        names = [name for name in opened.namelist() if name.endswith(".dist-info/METADATA")]
        release = _release([opened.read(name).decode() for name in names])
        if FILE not in opened.namelist():
            raise UsageError(f"vllm {release} has no {FILE}; allowed: {_ALLOWED}")
        return f"{wheel.name}/{FILE}", opened.read(FILE).decode(), release


def _release(metadata: list[str]) -> str:
    found = [HeaderParser().parsestr(text).get("Version", "") for text in metadata]
    return found[0] if found else "unknown"


def _run(name: str, source: str) -> ModuleType:
    module = ModuleType("_moetail_vllm_moe_output")
    module.__file__ = name
    sys.modules[module.__name__] = module  # dataclasses look their module up
    exec(compile(source, name, "exec"), vars(module))
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


_NAME, _SOURCE, _RELEASE = _found()
VERSIONS: dict[str, str] = {"vllm": _RELEASE}
_VLLM = _run(_NAME, _SOURCE)
_check_classes(_VLLM, _RELEASE)


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
