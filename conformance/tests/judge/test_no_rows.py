"""A rank may hold no row at all: then every route is -1."""

import torch

from moetail.conformance.judge import judge
from moetail.spec import MoEOutput, UnfinalizedMoEOutput


def test_no_rows_and_no_local_route_is_zero() -> None:
    x = UnfinalizedMoEOutput(
        torch.empty((0, 256), dtype=torch.bfloat16),
        torch.full((3, 2), float("nan")),
        torch.full((3, 2), -1, dtype=torch.int32),
    )
    zero = torch.zeros((3, 256), dtype=torch.bfloat16)
    verdict = judge("finalize_moe_output", [{"x": MoEOutput(x)}], [zero])
    assert verdict.conforms
    assert verdict.judged == zero.numel()
    zero[2, 255] = 1.0
    assert judge("finalize_moe_output", [{"x": MoEOutput(x)}], [zero]).wrong == 1
