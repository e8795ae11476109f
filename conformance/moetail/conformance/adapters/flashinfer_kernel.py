"""FlashInfer's ``trtllm_moe_finalize_allreduce_fusion`` (CUDA), as its own Python calls it.

One kernel finalizes a MoE layer's rows, sums over ranks, adds the residual and norms. Its library
is FlashInfer's unchanged source with its own bindings, compiled with FlashInfer's flags by

    python kernels/benchmarks/peers.py flashinfer

and found by :func:`find_library`. T tokens, K routes a token, H hidden, W ranks; all rows BF16.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moetail.conformance.adapters import NotMapped
from moetail.conformance.implementation import UsageError
from moetail.reference import Reference
from moetail.spec import MoEOutput, checks
from moetail.spec.operations import ALLREDUCE

__all__ = [
    "DEFAULT_FOLDER",
    "LIBRARY",
    "WORLD_SIZES",
    "Exchange",
    "Kernel",
    "communication_bytes",
    "compose",
    "exchange_for",
    "find_library",
    "flags",
    "launch",
    "load_library",
    "mapped",
    "pointer_table",
    "why_not",
]

LIBRARY = "trtllm_moe_finalize_allreduce.so"
VARIABLE = "MOETAIL_FLASHINFER_LIBRARY"
DEFAULT_FOLDER = Path(".peers") / "flashinfer"
WORLD_SIZES = (2, 4, 8, 16)
"""What the kernel is compiled for."""

_FUNCTION = "trtllm_moe_finalize_allreduce_fusion"
_VECTOR = 8  # elements of a 16-byte access, of which H must be a multiple
_BUFFERS = 3  # this call's, the one before's (which it clears), and a spare
_EMPTY = -0x8000  # the bits of -0.0: no value is there yet
_LEAST_BYTES = 1 << 26
# The kernel multiplies by 2 in 32 bits to find the third buffer.
_MOST_BYTES = 1 << 29
_MOST_ELEMENTS = 2**31 - 1


# --- the library ----------------------------------------------------------------------------------


def find_library(*folders: Path) -> Path | None:
    """The compiled library, or None where there is none.

    What the environment's ``MOETAIL_FLASHINFER_LIBRARY`` names comes first; then a file of the name
    :data:`LIBRARY` in the folder that ``MOETAIL_FLASHINFER`` names, in ``folders``, and in
    ``.peers/flashinfer`` under the working directory.

    Raises:
        UsageError: ``MOETAIL_FLASHINFER_LIBRARY`` names no file.
    """
    named = os.environ.get(VARIABLE)
    if named:
        path = Path(named).expanduser()
        if not path.is_file():
            raise UsageError(
                f"{VARIABLE}: there is no file {path}; allowed: a library that "
                "kernels/benchmarks/peers.py built"
            )
        return path.resolve()
    source = os.environ.get("MOETAIL_FLASHINFER")
    places = [Path(source).expanduser()] if source else []
    for folder in (*places, *folders, DEFAULT_FOLDER):
        if (folder / LIBRARY).is_file():
            return (folder / LIBRARY).resolve()
    return None


@functools.cache
def load_library(path: Path) -> Callable[..., None]:
    """The kernel's binding.

    Raises:
        UsageError: tvm-ffi is not installed, or the library does not load.
    """
    try:
        import tvm_ffi

        function: Callable[..., None] = tvm_ffi.load_module(str(path))[_FUNCTION]
    except Exception as error:
        raise UsageError(
            f"{path.name} cannot be loaded ({type(error).__name__}: {error}); allowed: a library "
            "that kernels/benchmarks/peers.py built, with apache-tvm-ffi and CUDA 13 installed"
        ) from error
    return function


# --- the workspace --------------------------------------------------------------------------------


def communication_bytes(world_size: int, tokens: int, hidden: int) -> int:
    """Bytes of one of a rank's three buffers: a ``[T, H]`` BF16 part of every rank."""
    return world_size * tokens * hidden * 2


def flags(buffer_bytes: int) -> list[int]:
    """The kernel's five int32 counters, which it keeps from call to call.

    Blocks that have begun, an unused flag, the turn of the three buffers, a buffer's bytes, and the
    elements that the next call clears.
    """
    return [0, 0, 0, buffer_bytes, 0]


def pointer_table(buffers: Sequence[int], counters: int) -> list[int]:
    """The ``3 W + 1`` addresses of FlashInfer's workspace, as an int64 tensor holds them.

    Its other kernels use the first ``2 W``, for two more buffers of each rank; this one reads the
    last ``W + 1``, so that the others lead nowhere.

    Args:
        buffers: where this rank finds each rank's triple buffer.
        counters: where this rank's :func:`flags` are.
    """
    return [0] * (2 * len(buffers)) + [*buffers, counters]


@dataclass(eq=False)
class Exchange:
    """What a rank of a group needs for the kernel.

    Attributes:
        rank, world_size: of the group.
        buffer_bytes: of one of the three buffers.
        table: :func:`pointer_table` on the device, int64.
        counters: :func:`flags` on the device, int32.
        kept: what must live as long: the buffers, and their mappings on other ranks.
    """

    rank: int
    world_size: int
    buffer_bytes: int
    table: Tensor
    counters: Tensor
    kept: tuple[Any, ...]

    @classmethod
    def create(cls, group: dist.ProcessGroup, buffer_bytes: int) -> Exchange:
        """On the current device, over memory that every rank of an NCCL group maps; a collective.

        Plain addresses of the peers' memory, no multicast.
        """
        import torch.distributed._symmetric_memory as symmetric

        device = torch.device("cuda", torch.cuda.current_device())
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        own = symmetric.empty(_BUFFERS * buffer_bytes // 2, dtype=torch.int16, device=device)
        handle: Any = symmetric.rendezvous(own, group)
        offset = own.data_ptr() - handle.buffer_ptrs[rank]
        own.fill_(_EMPTY)
        counters = torch.tensor(flags(buffer_bytes), dtype=torch.int32, device=device)
        buffers = [pointer + offset for pointer in handle.buffer_ptrs]
        table = torch.tensor(
            pointer_table(buffers, counters.data_ptr()), dtype=torch.int64, device=device
        )
        # A peer may write as soon as it is through here.
        torch.cuda.synchronize(device)
        dist.barrier(group)
        torch.cuda.synchronize(device)
        return cls(rank, world_size, buffer_bytes, table, counters, (own, handle))


_EXCHANGES: dict[str, list[Exchange]] = {}


def exchange_for(group: dist.ProcessGroup, tokens: int, hidden: int) -> Exchange:
    """This rank's exchange for calls of that size; a collective at the first, and at larger ones.

    Smaller ones are kept, since captured graphs may use them.
    """
    made = _EXCHANGES.setdefault(group.group_name, [])
    needed = communication_bytes(dist.get_world_size(group), tokens, hidden)
    for exchange in made:
        if exchange.buffer_bytes >= needed:
            return exchange
    made.append(Exchange.create(group, max(_LEAST_BYTES, 1 << (needed - 1).bit_length())))
    return made[-1]


# --- a call ---------------------------------------------------------------------------------------


class Kernel(Protocol):
    """The kernel on all ranks.

    With p = RN(RN(sum of rows) * factor + shared) on each rank, hidden = RN(sum of p + residual)
    and normalized = RMSNorm(hidden) * gamma, where every step is rounded as the kernel pleases.
    """

    def __call__(
        self,
        rows: Tensor,
        index: Tensor,
        weights: Tensor | None,
        shared: Tensor | None,
        factor: float,
        residual: Tensor,
        gamma: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """hidden and normalized, BF16 ``[T, H]``.

        Args:
            rows: BF16 ``[R, H]``.
            index: int32 ``[T, K]``, rows of the routes, or -1.
            weights: BF16 ``[T, K]``, or None for ones.
            shared: BF16 ``[T, H]``, or None.
            factor: what the sum of a token's rows is multiplied by.
            residual: BF16 ``[T, H]``.
            gamma: BF16 ``[H]``.
            eps: of the norm.
        """


def launch(
    function: Callable[..., None],
    exchange: Exchange,
    rows: Tensor,
    index: Tensor,
    weights: Tensor | None,
    shared: Tensor | None,
    factor: float,
    residual: Tensor,
    gamma: Tensor,
    eps: float,
    *,
    dependent: bool = True,
) -> tuple[Tensor, Tensor]:
    """Start the kernel on the current stream; the arguments are :class:`Kernel`'s.

    Args:
        function: of :func:`load_library`.
        exchange: large enough for the call.
        dependent: programmatic dependent launch, which engines ask for.

    Raises:
        RuntimeError: what the binding refuses.
    """
    hidden, normalized = torch.empty_like(residual), torch.empty_like(residual)
    function(
        rows,
        residual,
        gamma,
        index,
        # Never None: the kernel stores there whenever gamma is given, which it always is.
        normalized,
        hidden,
        None,  # quant_out
        None,  # scale_out
        dependent,
        exchange.table,
        exchange.rank,
        exchange.world_size,
        float(eps),
        shared,
        weights,
        float(factor),
        None,  # weight_bias
    )
    return hidden, normalized


def why_not(residual: Tensor, world_size: int) -> str | None:
    """Why the kernel is not meant for a call, or None; the same on every rank."""
    tokens, hidden = residual.shape
    if not residual.is_cuda:
        return f"FlashInfer's kernel runs on GPUs, not on {residual.device.type}"
    if world_size not in WORLD_SIZES:
        sizes = ", ".join(map(str, WORLD_SIZES))
        return f"FlashInfer's kernel is compiled for {sizes} ranks, not for {world_size}"
    if hidden % _VECTOR:
        return f"FlashInfer's kernel takes multiples of {_VECTOR} as H, not {hidden}"
    if communication_bytes(world_size, tokens, hidden) > _MOST_BYTES:
        return f"{tokens} tokens need a workspace of more than {_MOST_BYTES} bytes a buffer"
    return None


_reference = Reference()


def compose(
    kernel: Kernel,
    x: MoEOutput,
    residual: Tensor,
    post_weight: Tensor | None,
    post_eps: float | None,
    next_weight: Tensor | None,
    next_eps: float | None,
    scales: tuple[float, float] | None,
) -> tuple[Tensor, Tensor | None]:
    """``beam_finalize_allreduce_norm_residual_norm`` from the kernel and the reference's stages.

    All of it comes from the kernel, except

    - products with weights that are not BF16. The kernel reads any weights as BF16, so the rows
      come multiplied already, each product rounded into BF16 as the kernel rounds its own;
    - the residual's product with its scale (the reference's);
    - everything behind the sum over ranks where a post-norm or a scale stands between that sum and
      the residual. The kernel then adds a residual of zeros, which returns the sum as it is.

    Args:
        kernel: the kernel, or what acts like it.

    Raises:
        OverflowError: a buffer of rows past 2^31 elements. The kernel multiplies row by H in 32
            bits, and would read elsewhere, which may end the process.
    """
    routed = x.routed
    weights: Tensor | None
    if isinstance(routed, Tensor):
        rows, weights = routed, None
        index = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)[:, None]
    else:
        rows, weights = routed.gemm2_permuted, routed.expert_weights
        index = routed.expanded_idx_to_permuted_idx
        if rows.numel() > _MOST_ELEMENTS:
            raise OverflowError(
                f"{rows.numel()} elements of rows: FlashInfer's kernel multiplies row by H in 32 "
                "bits and wraps past 2^31"
            )
        if rows.shape[0] == 0:
            # A rank without local experts; the binding takes no null pointer, and producers pad.
            rows = rows.new_zeros((1, rows.shape[1]))
        if weights.dtype is not torch.bfloat16:
            rows, weights = _weighted(rows, weights, index), None
    finalized = (rows, index, weights, x.shared_output, x.routed_scaling_factor)
    gamma = residual.new_ones(residual.shape[1]) if next_weight is None else next_weight
    if post_eps is not None or (scales is not None and scales[0] != 1.0):
        reduced, _ = kernel(*finalized, torch.zeros_like(residual), gamma, 1.0)
        return _reference.beam_norm_residual_norm(
            reduced, residual, post_weight, post_eps, next_weight, next_eps, scales
        )
    if scales is not None:
        residual = scaled(residual, scales[1])
    hidden, normalized = kernel(
        *finalized, residual, gamma, 1.0 if next_eps is None else float(next_eps)
    )
    return hidden, None if next_eps is None else normalized


def scaled(value: Tensor, factor: float) -> Tensor:
    """The product as the contract's stage "scale" rounds it, and its residual add its products."""
    return _reference.through(("scale",), {"rows": value, "routed_scale": factor})


def _weighted(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    """The rows, each times the weight of its route and rounded; rows of no route as they are.

    Every route has a row of its own. Nothing here waits for the device.
    """
    number = rows.shape[0]
    places = index.masked_fill(index < 0, number).long().flatten()
    factors = torch.ones(number + 1, dtype=torch.float32, device=rows.device)
    factors.scatter_(0, places, weights.to(torch.float32).flatten())
    # An FP32 product, rounded once where it is stored.
    return torch.mul(rows, factors[:number, None], out=torch.empty_like(rows))


def mapped(library: Path) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """``beam_finalize_allreduce_norm_residual_norm`` by FlashInfer's kernel.

    The workspace that it is given only says which group calls: the kernel has one of its own, which
    is made at the first call.
    """
    function = load_library(library)

    def beam_finalize_allreduce_norm_residual_norm(
        x: MoEOutput,
        residual: Tensor,
        post_weight: Tensor | None,
        post_eps: float | None,
        next_weight: Tensor | None,
        next_eps: float | None,
        scales: tuple[float, float] | None,
        workspace: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """See :meth:`moetail.spec.MoETail.beam_finalize_allreduce_norm_residual_norm`."""
        _check(locals())
        tail = (post_weight, post_eps, next_weight, next_eps, scales)
        reason = why_not(residual, workspace.world_size)
        if reason is not None:
            raise NotMapped(reason)
        exchange = exchange_for(workspace.device_group, *residual.shape)
        kernel: Kernel = functools.partial(launch, function, exchange)
        return compose(kernel, x, residual, *tail)

    return beam_finalize_allreduce_norm_residual_norm


def _check(call: dict[str, Any]) -> None:
    """The refusals of the contract: FlashInfer's kernel refuses next to nothing."""
    checks.check(ALLREDUCE, call)
    # The map's values cannot be read while a graph is captured.
    if not (call["residual"].is_cuda and torch.cuda.is_current_stream_capturing()):
        checks.check_values(ALLREDUCE, call)
