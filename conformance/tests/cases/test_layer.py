"""The MoE layer against a dense evaluation in float64."""

from __future__ import annotations

import math

import pytest
import torch

from moetail.conformance.cases import MODELS, Case, Model
from moetail.conformance.cases.case import problem_of
from moetail.conformance.cases.layer import MoELayer, route
from moetail.spec import UnfinalizedMoEOutput


@pytest.mark.parametrize("name", list(MODELS))
def test_rows_and_weights_give_the_dense_layer(name: str) -> None:
    model = MODELS[name]
    layer = MoELayer(model, 256, model.experts, model.top_k, seed=3)
    x = layer.tokens(6)
    ids, weights = layer.routes(x)
    rows = layer.rows(x, ids)
    sparse = (rows.double() * weights.double().unsqueeze(-1)).sum(1)
    gates = torch.zeros((6, model.experts), dtype=torch.float64).scatter(1, ids, weights.double())
    dense = torch.zeros((6, 256), dtype=torch.float64)
    for expert in range(model.experts):
        w13, w2 = layer.expert_weights(expert)
        gate, up = (x @ w13.T * (1.7 / math.sqrt(256))).chunk(2, -1)
        out = (torch.nn.functional.silu(gate) * up) @ w2.T * (4.0 / math.sqrt(layer.intermediate))
        dense += gates[:, expert : expert + 1] * out
    # Three BF16 roundings of 2^-9 each lie between them.
    assert (sparse - dense).abs().max() <= 2.0**-6 * dense.abs().max()
    assert sparse.abs().mean() > 0.01, "the layer's output carries no signal"


@pytest.mark.parametrize("name", list(MODELS))
def test_weights_follow_the_model(name: str) -> None:
    model = MODELS[name]
    layer = MoELayer(model, 256, model.experts, model.top_k, seed=1)
    ids, weights = layer.routes(layer.tokens(8))
    assert all(len(set(row)) == model.top_k for row in ids.tolist())
    assert bool((weights > 0).all())
    if model.renormalize:
        assert torch.allclose(weights.sum(1), torch.ones(8), atol=1e-6)
    else:
        assert bool((weights <= 1).all())
    assert len(set(ids.flatten().tolist())) > model.top_k, "every token goes to the same experts"


def test_groups_limit_the_choice() -> None:
    model = MODELS["deepseek-v3"]
    logits = torch.randn((64, 256), generator=torch.Generator().manual_seed(0)).double()
    ids, _ = route(logits, torch.zeros(256).double(), model, 8)
    groups = [len({expert // 32 for expert in row}) for row in ids.tolist()]
    assert max(groups) <= 4


def test_bias_moves_the_choice_and_not_the_weights() -> None:
    model = Model("test", 256, 4, 1, scoring="sigmoid", renormalize=False, bias=True)
    logits = torch.tensor([[1.0, 0.5, 0.0, -1.0]], dtype=torch.float64)
    bias = torch.tensor([0.0, 0.0, 0.0, 5.0], dtype=torch.float64)
    ids, weights = route(logits, bias, model, 1)
    assert ids.item() == 3
    assert weights.item() == pytest.approx(torch.sigmoid(torch.tensor(-1.0)).item())


def test_experts_differ() -> None:
    layer = MoELayer(MODELS["mixtral-8x7b"], 256, 8, 2, seed=0)
    x = layer.tokens(1)
    outputs = torch.cat([layer.expert(number, x) for number in range(9)])
    correlation = torch.corrcoef(outputs) - torch.eye(9)
    assert correlation.abs().max() < 0.6


def test_the_shared_expert_is_split_over_ranks() -> None:
    layer = MoELayer(MODELS["deepseek-v3"], 256, 16, 2, seed=0)
    x = layer.tokens(3)
    whole = layer.shared(x, 1).double().sum(0)
    parts = layer.shared(x, 4).double()
    assert (parts.sum(0) - whole).abs().max() <= 2.0**-6 * whole.abs().max()
    assert all(bool(part.any()) for part in parts)


def test_the_routed_scale_is_folded_in_or_given() -> None:
    folded = Case("finalize_moe_output", "moe", 0, 4, 8, 256, model="deepseek-v3")
    given = folded.replace(routed_scale=2.5)
    torch.testing.assert_close(problem_of(folded).weights.sum(1), torch.full((4,), 2.5))
    torch.testing.assert_close(problem_of(given).weights.sum(1), torch.full((4,), 1.0))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_ranks_together_give_the_layer(ranks: int) -> None:
    case = Case(
        "beam_finalize_allreduce_norm_residual_norm",
        "moe",
        5,
        6,
        8,
        256,
        model="qwen3-235b",
        ranks=ranks,
    )
    whole = problem_of(case)
    expected = (whole.rows.double() * whole.weights.double().unsqueeze(-1)).sum(1)
    total = torch.zeros_like(expected)
    for rank in range(ranks):
        x = case.arguments(rank)["x"].routed
        assert isinstance(x, UnfinalizedMoEOutput)
        index = x.expanded_idx_to_permuted_idx.long()
        rows = x.gemm2_permuted[index.clamp(min=0)].double()
        term = rows * x.expert_weights.double().unsqueeze(-1)
        total += torch.where((index >= 0).unsqueeze(-1), term, 0.0).sum(1)
    torch.testing.assert_close(total, expected)


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.in_domain])
def test_models_at_their_real_size(name: str) -> None:
    model = MODELS[name]
    case = Case("beam_moe_finalize", "moe", 0, 2, model.top_k, model.hidden, model=name)
    arguments = case.arguments()
    assert arguments["expert_outputs"].shape == (2, model.top_k, model.hidden)
    assert bool(arguments["expert_outputs"].isfinite().all())


def test_gpt_oss_is_outside_the_domain() -> None:
    model = MODELS["gpt-oss-120b"]
    assert not model.in_domain
    with pytest.raises(ValueError, match="hidden"):
        Case("beam_moe_finalize", "moe", 0, 2, 4, model.hidden, model=model.name)
    assert Case("finalize_moe_output", "moe", 0, 2, 4, 2880, model=model.name).arguments()
