"""The criteria of public tests, on tensors made by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moetail.conformance.score.criteria import CRITERIA, Criterion

BY_ID = {item.id: item for item in CRITERIA}


def _ones(count: int = 100) -> Tensor:
    return torch.ones(4, count, dtype=torch.bfloat16)


@pytest.mark.parametrize("item", CRITERIA, ids=lambda item: item.id)
def test_equal_tensors_pass_and_other_shapes_fail(item: Criterion) -> None:
    assert item.passes(_ones(), _ones())
    assert not item.passes(_ones(99), _ones())
    assert item.passes(_ones(0), _ones(0))


@pytest.mark.parametrize("item", CRITERIA, ids=lambda item: item.id)
def test_nan_where_a_number_is_due_fails(item: Criterion) -> None:
    spoiled = _ones()
    spoiled[0, 0] = torch.nan
    assert not item.passes(spoiled, _ones())


@pytest.mark.parametrize(
    ("criterion", "passing", "failing"),
    [
        ("rtol-atol-0.2", 1.375, 1.5),
        ("rtol-atol-0.1", 1.1875, 1.25),
        ("rtol-atol-0.01", 1.0156, 1.0313),
        ("torch-bf16", 1.0156, 1.0234),
        ("absolute-0.13", 1.125, 1.1406),
        ("bitwise", 1.0, 1.0078),
    ],
)
def test_one_element_decides(criterion: str, passing: float, failing: float) -> None:
    for value, expected in ((passing, True), (failing, False)):
        got = _ones()
        got[1, 2] = value
        assert BY_ID[criterion].passes(got, _ones()) is expected


def test_five_percent_may_be_anything() -> None:
    got = _ones()
    got.view(-1)[:20] = 1000.0
    assert BY_ID["95-percent"].passes(got, _ones())
    got.view(-1)[20] = 1000.0
    assert not BY_ID["95-percent"].passes(got, _ones())


def test_the_cosine_does_not_see_a_factor() -> None:
    """A scale that is applied twice, or never, passes."""
    gen = torch.Generator().manual_seed(1)
    expected = torch.randn(8, 64, generator=gen).to(torch.bfloat16)
    assert BY_ID["cosine-0.999"].passes(expected * 2, expected)
    assert not BY_ID["cosine-0.999"].passes(-expected, expected)


def test_bitwise_sees_the_sign_of_a_zero() -> None:
    zero = torch.zeros(1, 1, dtype=torch.bfloat16)
    assert not BY_ID["bitwise"].passes(-zero, zero)
