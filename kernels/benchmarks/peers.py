"""What the kernels are compared with. Nothing of it is part of the project.

As a command, this takes what is needed out of a peer's wheel into the ignored folder ``.peers``:

    python kernels/benchmarks/peers.py vllm [WHEEL]
    python kernels/benchmarks/peers.py flashinfer [WHEEL] [--arch 9.0a]

Without a WHEEL it is the one that ``MOETAIL_VLLM`` or ``MOETAIL_FLASHINFER`` names, or pip
downloads the newest.

vLLM's boundary kernel is one file. It needs two names of the engine, which a stub gives it, so that
the engine is not needed. FlashInfer's fused finalize, all-reduce and norm is compiled, which needs
nvcc and no GPU, into ``.peers/flashinfer/trtllm_moe_finalize_allreduce.so``; beside it lies what
``moetail check flashinfer`` reads, so that ``MOETAIL_FLASHINFER=.peers/flashinfer`` serves both.
Its residual add and norm go into ``fused_add_rmsnorm.so``.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
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

from moetail.conformance.adapters import flashinfer_kernel
from moetail.kernels import build

PEERS = Path(__file__).parents[2] / ".peers"
MEMBER = "vllm/models/beam/nvidia/layernorm.py"

FLASHINFER = PEERS / "flashinfer"
SOURCE = "flashinfer/data/csrc/trtllm_moe_allreduce_fusion.cu"
NORM = "fused_add_rmsnorm"
# FlashInfer's binding of its norms takes all of them; this one takes what the benchmark calls.
NORM_BINDING = """\
#include <flashinfer/norm.cuh>

#include "tvm_ffi_utils.h"

namespace {

void fused_add_rmsnorm(tvm::ffi::TensorView input, tvm::ffi::TensorView residual,
                       tvm::ffi::TensorView weight, double eps, bool dependent) {
  const cudaError_t status = flashinfer::norm::FusedAddRMSNorm(
      static_cast<nv_bfloat16*>(input.data_ptr()), static_cast<nv_bfloat16*>(residual.data_ptr()),
      static_cast<nv_bfloat16*>(weight.data_ptr()), static_cast<uint32_t>(input.size(0)),
      static_cast<uint32_t>(input.size(1)), static_cast<uint32_t>(input.stride(0)),
      static_cast<uint32_t>(residual.stride(0)), static_cast<float>(eps), dependent,
      get_stream(input.device()));
  TVM_FFI_ICHECK(status == cudaSuccess) << cudaGetErrorString(status);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(fused_add_rmsnorm, fused_add_rmsnorm);
"""
# Beginnings of the names of what is taken; the last is what the adapter reads.
TAKEN = (
    SOURCE,
    "flashinfer/data/csrc/tvm_ffi_utils.h",
    "flashinfer/data/include/flashinfer/",
    "flashinfer/trace/templates/comm.py",
)
# Those of flashinfer/jit/core.py. Without NDEBUG or optimization the binding would run off the end
# of a function that returns the status of the launch.
FLAGS = (
    "-O3",
    "-DNDEBUG",
    "-use_fast_math",
    "-DFLASHINFER_ENABLE_F16",
    "-DFLASHINFER_ENABLE_BF16",
    "-DFLASHINFER_ENABLE_FP8_E4M3",
    "-DFLASHINFER_ENABLE_FP8_E5M2",
    "--expt-relaxed-constexpr",
    "-Xfatbin=-compress-all",
    "--compress-mode=size",
)
# In place of spdlog's headers: the launcher warns at every call of more than 128 tokens.
QUIET = """\
#pragma once
#include <memory>
#include <string>

namespace spdlog {
namespace level {
enum level_enum { off };
}
namespace sinks {
struct stdout_color_sink_mt {
  void set_pattern(std::string const&) {}
  void set_level(level::level_enum) {}
};
}  // namespace sinks
struct logger {
  template <class... Arguments>
  explicit logger(Arguments&&...) {}
};
inline void set_default_logger(std::shared_ptr<logger>) {}
inline void set_level(level::level_enum) {}
template <class... Arguments>
void warn(Arguments&&...) {}
}  // namespace spdlog
"""

# In place of headers, by name. Nothing of cuBLAS and cuRAND is used, which a compiler may lack.
STAND_INS = {
    **dict.fromkeys(("cublasLt.h", "cublas_v2.h", "curand_kernel.h"), "#pragma once\n"),
    "spdlog/spdlog.h": QUIET,
    "spdlog/sinks/stdout_color_sinks.h": QUIET,
}


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


def flashinfer_finalize() -> Callable[..., None] | None:
    """The binding of FlashInfer's kernel, or None where it was not built."""
    library = flashinfer_kernel.find_library(FLASHINFER)
    return None if library is None else flashinfer_kernel.load_library(library)


def flashinfer_norm() -> Callable[[Tensor, Tensor, Tensor, float, bool], None] | None:
    """FlashInfer's ``fused_add_rmsnorm``, in place, or None where it was not built."""
    library = flashinfer_kernel.find_library(FLASHINFER)
    path = None if library is None else library.with_name(f"{NORM}.so")
    if path is None or not path.exists():
        return None
    import tvm_ffi

    norm: Callable[[Tensor, Tensor, Tensor, float, bool], None]
    norm = tvm_ffi.load_module(str(path))[NORM]
    return norm


def take_vllm(wheel: Path) -> Path:
    """Take vLLM's boundary kernel out of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(MEMBER, PEERS)
    return PEERS / MEMBER


def take_flashinfer(wheel: Path, arch: str) -> Path:
    """Take FlashInfer's kernel out of the wheel and compile it for compute capabilities.

    Args:
        wheel: of flashinfer-python.
        arch: such as "9.0a", or several with spaces between.

    Returns:
        The library.
    """
    shutil.rmtree(FLASHINFER, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(TAKEN) or name.endswith(".dist-info/METADATA"):
                archive.extract(name, FLASHINFER)
    for name, text in STAND_INS.items():
        header = FLASHINFER / "quiet" / name
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text(text)
    binding = FLASHINFER / "binding" / f"{NORM}.cu"
    binding.parent.mkdir()
    binding.write_text(NORM_BINDING)
    _compiled(NORM, binding, arch)
    return _compiled(flashinfer_kernel.LIBRARY.removesuffix(".so"), FLASHINFER / SOURCE, arch)


def _compiled(name: str, source: Path, arch: str) -> Path:
    """A library of one of FlashInfer's sources."""
    import tvm_ffi.cpp

    home = build._cuda_home()
    with build._environment({"CUDA_HOME": str(home), "TVM_FFI_CUDA_ARCH_LIST": arch}):
        built = tvm_ffi.cpp.build(
            name,
            sources=[str(source)],
            # Errors name a file as the wheel does.
            extra_cuda_cflags=[*FLAGS, f"-Xcompiler=-fmacro-prefix-map={FLASHINFER}/="],
            extra_ldflags=[f"-L{home / folder}" for folder in ("lib64", "lib")],
            extra_include_paths=[
                str(FLASHINFER / "flashinfer" / "data" / "include"),
                str(FLASHINFER / "flashinfer" / "data" / "csrc"),
                str(FLASHINFER / "quiet"),
            ],
            build_directory=str(FLASHINFER / "build" / name),
            backend="cuda",
        )
    return Path(shutil.copy(built, FLASHINFER / f"{name}.so"))


PACKAGES = {"vllm": "vllm", "flashinfer": "flashinfer-python"}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser("peers.py", description="Prepare a peer for the benchmarks.")
    parser.add_argument("peer", choices=list(PACKAGES))
    parser.add_argument("wheel", type=Path, nargs="?", help="of the peer's package")
    parser.add_argument("--arch", default="9.0a", help="compute capabilities to compile for")
    options = parser.parse_args(arguments)
    wheel: Path | None = options.wheel or _named(options.peer)
    with tempfile.TemporaryDirectory() as folder:
        if wheel is None:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", folder]
            subprocess.run([*command, PACKAGES[options.peer]], check=True)
            (wheel,) = Path(folder).glob("*.whl")
        made = take_vllm(wheel) if options.peer == "vllm" else take_flashinfer(wheel, options.arch)
    print(f"{made} from {wheel.name}")


def _named(peer: str) -> Path | None:
    """The wheel that the environment names for the adapter."""
    named = Path(os.environ.get(f"MOETAIL_{peer.upper()}") or ".").expanduser()
    return named if named.is_file() else None


if __name__ == "__main__":
    main(sys.argv[1:])
