"""What the kernels are compared with. Nothing of it is part of the project.

vLLM's boundary kernel is one file of its wheel. As a command, this takes it out into the ignored
folder ``.peers``:

    python kernels/benchmarks/peers.py [WHEEL]        # no WHEEL: pip downloads vllm's newest

The file needs two names of the engine, which a stub gives it, so that the engine is not needed.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PEERS = Path(__file__).parents[2] / ".peers"
MEMBER = "vllm/models/beam/nvidia/layernorm.py"


def vllm_boundary() -> Callable[..., Any] | None:
    """vLLM's ``beam_norm_residual_norm``, or None where it is not there or triton is not."""
    path = PEERS / MEMBER
    if not path.exists() or importlib.util.find_spec("triton") is None:
        return None
    import triton
    import triton.language

    stub: Any = types.ModuleType("vllm.triton_utils")
    stub.triton, stub.tl = triton, triton.language
    for name in ("vllm", stub.__name__):
        sys.modules.setdefault(name, stub if name == stub.__name__ else types.ModuleType(name))
    spec = importlib.util.spec_from_file_location("moetail_peer_vllm_layernorm", path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    boundary: Callable[..., Any] = module.beam_norm_residual_norm
    return boundary


def compiled_fused() -> Callable[..., tuple[Tensor, Tensor]]:
    """The reference's arithmetic of operation 5, all routes live, through torch.compile."""

    def norm(value: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = value.float()
        inverse = 1.0 / torch.sqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * inverse * weight.float()).bfloat16()

    def fused(
        slots: Tensor, weights: Tensor, residual: Tensor, post: Tensor, following: Tensor
    ) -> tuple[Tensor, Tensor]:
        total = (slots.float() * weights[..., None]).sum(1)
        scaled = (total.bfloat16().float() * 1.5).bfloat16()
        a = (norm(scaled, post, 1e-6).float() * 0.75).bfloat16()
        b = (residual.float() * 1.25).bfloat16()
        hidden = (a.float() + b.float()).bfloat16()
        return hidden, norm(hidden, following, 1e-5)

    compiled: Callable[..., tuple[Tensor, Tensor]] = torch.compile(
        fused, fullgraph=True, dynamic=False
    )
    return compiled


def main(arguments: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if arguments:
            wheel = Path(arguments[0])
        else:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", folder, "vllm"]
            subprocess.run(command, check=True)
            (wheel,) = Path(folder).glob("vllm-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(MEMBER, PEERS)
    print(f"{PEERS / MEMBER} from {wheel.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
