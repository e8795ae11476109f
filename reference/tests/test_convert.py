"""Operations 1 and 2: the producers' layouts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moetail import reference
from moetail.spec import ContractError, UnfinalizedMoEOutput

NAN = float("nan")


def deferred(tokens: int = 3, top_k: int = 2, rows: int = 11, hidden: int = 40) -> list:
    return [
        torch.full((rows, hidden), NAN, dtype=torch.bfloat16),
        torch.rand(tokens, top_k),
        torch.arange(tokens * top_k, dtype=torch.int32).view(tokens, top_k),
    ]


def convert(output, *, do_finalize=False, num_tokens=3, top_k=2, finalized_output=None):
    return reference.convert_flashinfer_moe_output(
        output,
        do_finalize=do_finalize,
        num_tokens=num_tokens,
        top_k=top_k,
        finalized_output=finalized_output,
    )


# --- operation 1, legal ---------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 40), (0, 40), (40,), (1, 2, 3)])
@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("given_back", [False, True])
def test_finalized_is_that_very_tensor(shape, wrap, given_back):
    tensor = torch.zeros(shape, dtype=torch.bfloat16)
    result = convert(
        [tensor] if wrap else tensor,
        do_finalize=True,
        finalized_output=tensor if given_back else None,
    )
    assert result is tensor


def test_an_alias_of_the_destination_is_accepted():
    buffer = torch.zeros(5, 40, dtype=torch.bfloat16)
    returned, destination = buffer[:3], buffer[:3]
    result = convert([returned], do_finalize=True, finalized_output=destination)
    assert result is returned


@pytest.mark.parametrize("container", [list, tuple])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 2), (6,), (2, 3), (6, 1), (1, 3, 2)])
def test_deferred_views_the_given_storage(container, dtype, shape):
    """[2, 3] has the right count and a last dimension that is not top_k."""
    gemm2, weights, index = deferred()
    weights = weights.to(dtype).view(shape)
    index = index.view(shape)
    result = convert(container([gemm2, weights, index]))
    assert isinstance(result, UnfinalizedMoEOutput)
    assert result.gemm2_permuted is gemm2
    assert result.expert_weights.shape == (3, 2)
    assert result.expert_weights.dtype is dtype
    assert result.expert_weights.data_ptr() == weights.data_ptr()
    assert result.expanded_idx_to_permuted_idx.shape == (3, 2)
    assert result.expanded_idx_to_permuted_idx.data_ptr() == index.data_ptr()
    assert result.expanded_idx_to_permuted_idx.flatten().tolist() == list(range(6))
    assert result.route_major is False


@pytest.mark.parametrize("rows", [0, 8])
def test_deferred_with_zero_tokens(rows):
    result = convert(deferred(tokens=0, top_k=6, rows=rows), num_tokens=0, top_k=6)
    assert result.expert_weights.shape == (0, 6)
    assert result.expanded_idx_to_permuted_idx.shape == (0, 6)
    assert result.gemm2_permuted.shape == (rows, 40)


# --- operation 1, refused -------------------------------------------------------------------------

tensor = torch.zeros(3, 40, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("output", "options", "argument", "found", "allowed"),
    [
        (deferred(), {"num_tokens": -1}, "num_tokens", "-1", ">= 0"),
        (deferred(), {"num_tokens": None}, "num_tokens", "None", "an integer >= 0"),
        (deferred(), {"top_k": 0}, "top_k", "0", ">= 1"),
        (deferred(), {"top_k": "3"}, "top_k", "'3'", "an integer >= 1"),
        (deferred(), {"top_k": -2}, "top_k", "-2", ">= 1"),
        (tensor, {"num_tokens": -1, "do_finalize": True}, "num_tokens", "-1", ">= 0"),
        (tensor, {"top_k": 0, "do_finalize": True}, "top_k", "0", ">= 1"),
        *(
            (output, {"do_finalize": True}, "flashinfer_output", found, "exactly one tensor")
            for output, found in (
                (None, "NoneType"),
                ([], "a list of 0"),
                ([tensor, tensor], "a list of 2"),
                (deferred(), "a list of 3"),
                ((tensor,), "tuple"),
                ([None], "list of NoneType"),
                ([[tensor]], "list of list"),
                (3.0, "float"),
            )
        ),
        (deferred(), {"finalized_output": tensor}, "finalized_output", "tensor", "None without"),
        *(
            (output, {}, "flashinfer_output", found, "three tensors")
            for output, found in (
                (None, "NoneType"),
                (tensor, "Tensor"),
                ([], "0 items"),
                (deferred()[:2], "2 items"),
                ([tensor], "1 items"),
                ([*deferred(), tensor], "4 items"),
                (dict(enumerate(deferred())), "dict"),
            )
        ),
    ],
)
def test_refused(output, options, argument, found, allowed):
    with pytest.raises(ContractError) as refusal:
        convert(output, **options)
    assert refusal.value.rule == "CONVERT-2"
    assert refusal.value.argument == argument
    assert found in refusal.value.found
    assert allowed in refusal.value.allowed


@pytest.mark.parametrize(
    ("position", "spoil", "argument", "found"),
    [
        *(
            (i, lambda _: None, name, "NoneType")
            for i, name in enumerate(("gemm2", "weights", "map"))
        ),
        (0, lambda t: t.flatten(), "gemm2", "rank 1"),
        (0, lambda t: t[None], "gemm2", "rank 3"),
        (2, lambda t: t.to(torch.int64), "map", "torch.int64"),
        (2, lambda t: t.to(torch.float32), "map", "torch.float32"),
        (2, lambda t: t.to(torch.int16), "map", "torch.int16"),
        (1, lambda t: t[:2].clone(), "weights", "4 elements"),
        (1, lambda t: torch.cat([t, t]), "weights", "12 elements"),
        (2, lambda t: t[:2].clone(), "map", "4 elements"),
        (2, lambda t: torch.cat([t, t]), "map", "12 elements"),
        (0, lambda t: t.to("meta"), "weights", "cpu"),
        (1, lambda t: t.to("meta"), "weights", "meta"),
        (2, lambda t: t.to("meta"), "map", "meta"),
        (0, lambda t: torch.zeros(11, 48, dtype=t.dtype)[:, :40], "gemm2", "strides [48, 1]"),
        (0, lambda t: torch.zeros(40, 11, dtype=t.dtype).t(), "gemm2", "strides [1, 11]"),
        (1, lambda t: t.t().contiguous().t(), "weights", "strides [1, 3]"),
        (2, lambda t: t.t().contiguous().t(), "map", "strides [1, 3]"),
    ],
)
def test_refused_deferred(position, spoil, argument, found):
    output = deferred()
    output[position] = spoil(output[position])
    before = [item.clone() if isinstance(item, torch.Tensor) else item for item in output]
    with pytest.raises(ContractError) as refusal:
        convert(output)
    assert refusal.value.rule == "CONVERT-2"
    assert refusal.value.argument == argument
    assert found in refusal.value.found
    assert isinstance(refusal.value, ValueError)
    for item, then in zip(output, before, strict=True):
        if isinstance(item, torch.Tensor) and not item.is_meta:
            assert torch.equal(item.nan_to_num(7.0), then.nan_to_num(7.0))


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (lambda t: t.view(40, 3), "shape"),
        (lambda t: t[:2], "shape"),
        (lambda t: t.view(torch.float16), "dtype"),
        (lambda t: t.to("meta"), "device"),
        (lambda t: t.clone(), "data pointer"),
        (lambda t: [t], "list"),
    ],
)
@pytest.mark.parametrize("wrap", [False, True])
def test_refused_destination(other, found, wrap):
    returned = torch.zeros(3, 40, dtype=torch.bfloat16)
    with pytest.raises(ContractError) as refusal:
        convert(
            [returned] if wrap else returned, do_finalize=True, finalized_output=other(returned)
        )
    assert refusal.value.rule == "CONVERT-4"
    assert refusal.value.argument == "finalized_output"
    assert found in refusal.value.found


# --- operation 2 ----------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(0, 5),
    top_k=st.integers(1, 5),
    experts=st.integers(1, 9),
    three_dimensional=st.booleans(),
    ids=st.sampled_from([torch.int32, torch.int64]),
    mapping=st.booleans(),
)
def test_route_major(seed, tokens, top_k, experts, three_dimensional, ids, mapping):
    generator = torch.Generator().manual_seed(seed)
    shape = (tokens, top_k, 24) if three_dimensional else (tokens * top_k, 24)
    routes = torch.randn(shape, generator=generator).to(torch.bfloat16)
    weights = torch.rand(tokens, top_k, generator=generator)
    topk_ids = torch.randint(-20, experts, (tokens, top_k), generator=generator).to(ids)
    expert_map = torch.randint(-3, 4, (experts,), generator=generator).to(torch.int32)
    before = [tensor.clone() for tensor in (routes, weights, topk_ids, expert_map)]
    result = reference.route_major_moe_output(
        routes, weights, topk_ids, expert_map if mapping else None
    )
    assert result.route_major is True
    assert result.gemm2_permuted.shape == (tokens * top_k, 24)
    assert result.gemm2_permuted.data_ptr() == routes.data_ptr()
    assert result.expert_weights is weights
    index = result.expanded_idx_to_permuted_idx
    assert index.dtype is torch.int32
    assert index.is_contiguous()
    assert index.shape == (tokens, top_k)
    for token in range(tokens):
        for k in range(top_k):
            expert = int(topk_ids[token, k])
            remote = mapping and (expert < 0 or int(expert_map[expert]) < 0)
            assert int(index[token, k]) == (-1 if remote else token * top_k + k)
    after = (routes, weights, topk_ids, expert_map)
    assert all(torch.equal(now, then) for now, then in zip(after, before, strict=True))


def route_major_arguments():
    return {
        "routes": torch.zeros(6, 24, dtype=torch.bfloat16),
        "topk_weights": torch.zeros(3, 2),
        "topk_ids": torch.zeros(3, 2, dtype=torch.int64),
        "expert_map": torch.tensor([0, -1, 1]),
    }


@pytest.mark.parametrize(
    ("name", "value", "rule", "argument", "found"),
    [
        ("routes", torch.zeros(6, 32, dtype=torch.bfloat16)[:, :24], "PACK-1", "routes", "[32, 1]"),
        ("routes", torch.zeros(3, 4, 24)[:, :2], "PACK-1", "routes", "strides [96, 24, 1]"),
        ("routes", torch.zeros(5, 24), "CONVERT-2", "routes", "[5, 24]"),
        ("routes", torch.zeros(8, 24), "CONVERT-2", "routes", "[8, 24]"),
        ("routes", torch.zeros(2, 3, 24), "CONVERT-2", "routes", "[2, 3, 24]"),
        ("routes", torch.zeros(24), "CONVERT-2", "routes", "[24]"),
        ("routes", torch.zeros(6, 24, device="meta"), "CONVERT-2", "topk_weights", "cpu"),
        ("routes", None, "CONVERT-2", "routes", "NoneType"),
        ("topk_weights", torch.zeros(2, 3), "CONVERT-2", "topk_weights", "[2, 3]"),
        ("topk_weights", torch.zeros(6), "CONVERT-2", "topk_weights", "[6]"),
        ("topk_ids", torch.zeros(6, dtype=torch.int64), "CONVERT-2", "topk_ids", "[6]"),
        ("topk_ids", torch.zeros(3, 2), "CONVERT-2", "topk_ids", "torch.float32"),
        ("topk_ids", torch.full((3, 2), 3), "CONVERT-2", "topk_ids", "expert 3"),
        ("topk_ids", torch.zeros(3, 2, dtype=torch.bool), "CONVERT-2", "topk_ids", "torch.bool"),
        ("expert_map", torch.zeros(3), "CONVERT-2", "expert_map", "torch.float32"),
        ("expert_map", torch.zeros(3, 1, dtype=torch.int32), "CONVERT-2", "expert_map", "rank 2"),
        ("expert_map", [0, 1, 2], "CONVERT-2", "expert_map", "list"),
    ],
)
def test_route_major_refused(name, value, rule, argument, found):
    with pytest.raises(ContractError) as refusal:
        reference.route_major_moe_output(**{**route_major_arguments(), name: value})
    assert refusal.value.rule == rule
    assert refusal.value.argument == argument
    assert found in refusal.value.found
