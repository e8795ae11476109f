"""What mutants share: a hook around every operation, and bits of FP32 numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moetail.reference import Reference
from moetail.spec.rules import ALLREDUCE, BOUNDARY, FINALIZE, FUSED, GATHER, MOE_OUTPUT

__all__ = ["COMPUTING", "Arguments", "Around", "narrowed", "rounded_to_bits", "with_rows"]

Arguments = dict[str, Any]

COMPUTING = (FINALIZE, BOUNDARY, FUSED, GATHER, MOE_OUTPUT, ALLREDUCE)


class Around(Reference):
    """The reference with :meth:`around` called about every computing operation."""

    def around(self, operation: str, call: Arguments, compute: Callable[[Arguments], Any]) -> Any:
        """``compute(call)`` is what the reference does; ``call`` has every argument by name."""
        return compute(call)


def _hooked(operation: str) -> Callable[..., Any]:
    signature = inspect.signature(getattr(Reference, operation))

    def method(self: Around, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        call = dict(bound.arguments)
        del call["self"]
        inner = getattr(super(Around, self), operation)
        return self.around(operation, call, lambda changed: inner(**changed))

    return method


for _operation in COMPUTING:
    setattr(Around, _operation, _hooked(_operation))


def with_rows(call: Arguments, change: Callable[[Tensor], Tensor]) -> Arguments:
    """The call with its routed rows changed, if it has any that are tensors."""
    call = dict(call)
    if "expert_outputs" in call:
        call["expert_outputs"] = change(call["expert_outputs"])
        return call
    x = call["x"]
    if isinstance(x, Tensor):
        call["x"] = change(x)
    elif hasattr(x, "gemm2_permuted"):
        call["x"] = replace(x, gemm2_permuted=change(x.gemm2_permuted))
    elif isinstance(x.routed, Tensor):
        call["x"] = replace(x, routed=change(x.routed))
    else:
        changed = replace(x.routed, gemm2_permuted=change(x.routed.gemm2_permuted))
        call["x"] = replace(x, routed=changed)
    return call


def narrowed(value: Tensor, dtype: torch.dtype) -> Tensor:
    """FP32 through another dtype and back."""
    return value.to(dtype).to(torch.float32)


def rounded_to_bits(value: Tensor, addend: Callable[[Tensor], Tensor | int]) -> Tensor:
    """FP32 to BF16 the way hand-written kernels do: add to the 16 bits that go, and cut them off.

    ``addend`` takes the bits as int64, which cannot overflow, and says what to add; 0x7FFF plus the
    last kept bit would be the contract's rounding. NaN and infinity are left to torch.
    """
    bits = value.to(torch.float32).contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    kept = (bits + addend(bits)) & 0xFFFF0000
    signed = torch.where(kept >= 1 << 31, kept - (1 << 32), kept).to(torch.int32)
    cut = signed.view(torch.float32)
    return torch.where(value.isfinite(), cut, value.to(torch.float32)).to(torch.bfloat16)
