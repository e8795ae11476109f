"""The criteria by which public tests of such kernels decide, to compare with the judge.

Each takes what was computed and what is expected, tensors of one shape, and says whether the test
would pass. The expected tensor is the reference's: that is what those tests compare with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["CRITERIA", "Criterion"]


@dataclass(frozen=True)
class Criterion:
    """One way to decide.

    Attributes:
        id: such as ``"rtol-atol-0.2"``.
        heading: a column heading.
        used_by: where it is in use.
        passes: (got, expected) -> whether a test by this criterion passes.
    """

    id: str
    heading: str
    used_by: str
    passes: Callable[[Tensor, Tensor], bool]


def _close(rtol: float, atol: float) -> Callable[[Tensor, Tensor], bool]:
    """torch.allclose, with NaN equal to NaN, in FP32: the usual check."""

    def passes(got: Tensor, expected: Tensor) -> bool:
        return torch.allclose(got.float(), expected.float(), rtol, atol, equal_nan=True)

    return passes


def _cosine(least: float) -> Callable[[Tensor, Tensor], bool]:
    """The cosine of the two tensors, flattened, in FP64; what is not finite has none."""

    def passes(got: Tensor, expected: Tensor) -> bool:
        left, right = got.double().flatten(), expected.double().flatten()
        if not left.numel() or torch.equal(left, right):
            return True
        scale = left.norm() * right.norm()
        return bool(scale > 0) and float((left @ right) / scale) >= least

    return passes


def _most_close(share: float, rtol: float, atol: float) -> Callable[[Tensor, Tensor], bool]:
    """That share of the elements is close, and all are finite where the expected ones are."""

    def passes(got: Tensor, expected: Tensor) -> bool:
        left, right = got.float(), expected.float()
        if bool((right.isfinite() & ~left.isfinite()).any()):
            return False
        close = torch.isclose(left, right, rtol, atol, equal_nan=True)
        return not close.numel() or float(close.double().mean()) >= share

    return passes


def _same_bits(got: Tensor, expected: Tensor) -> bool:
    return got.dtype == expected.dtype and torch.equal(
        got.contiguous().view(torch.int16), expected.contiguous().view(torch.int16)
    )


def _shaped(passes: Callable[[Tensor, Tensor], bool]) -> Callable[[Tensor, Tensor], bool]:
    """Every public test fails on another shape."""
    return lambda got, expected: got.shape == expected.shape and passes(got, expected)


CRITERIA: tuple[Criterion, ...] = tuple(
    Criterion(key, heading, used_by, _shaped(passes))
    for key, heading, used_by, passes in (
        (
            "rtol-atol-0.2",
            "rtol = atol = 0.2",
            "FlashInfer's test of finalize + all-reduce",
            _close(0.2, 0.2),
        ),
        ("rtol-atol-0.1", "1e-1", "QuACK's BF16 RMSNorm test", _close(1e-1, 1e-1)),
        ("rtol-atol-0.01", "1e-2", "FlashInfer's default trace tolerance", _close(1e-2, 1e-2)),
        (
            "torch-bf16",
            "torch BF16 default",
            "torch.testing.assert_close (rtol 1.6e-2, atol 1e-5)",
            _close(1.6e-2, 1e-5),
        ),
        ("cosine-0.999", "cosine 0.999", "tests of quantized MoE layers", _cosine(0.999)),
        (
            "95-percent",
            "95% within 1e-2",
            "FlashInfer-Bench's rule for MoE",
            _most_close(0.95, 1e-2, 1e-2),
        ),
        ("absolute-0.13", "absolute 0.13", "sglang #28226", _close(0.0, 0.13)),
        ("bitwise", "bitwise", "comparison with the reference's bits", _same_bits),
    )
)
