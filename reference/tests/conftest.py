"""Fixtures: the independent oracle, and inputs whose right answer is one value."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moetail.reference import BeamAllReduceWorkspace
from moetail.spec import MoEOutput, UnfinalizedMoEOutput


def load(name: str) -> ModuleType:
    """A module beside this file, without putting this folder on sys.path."""
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"moetail_reference_tests_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def oracle() -> ModuleType:
    return load("oracle")


class Grid:
    """Inputs on grids so coarse that FP32 sums and products are exact in every order.

    Rows are integers / 16 below 16 in magnitude and weights integers / 256 up to 1, so that 32
    products are multiples of 2^-12 below 2^9: 21 bits. Most sums need rounding to BF16.
    """

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def integers(self, shape: tuple[int, ...], low: int, high: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def rows(self, *shape: int) -> Tensor:
        return (self.integers(shape, -255, 256) / 16.0).to(torch.bfloat16)

    def weights(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return (self.integers(shape, 1, 256) / 256.0).to(dtype)

    def affine(self, hidden_size: int) -> Tensor:
        return (self.integers((hidden_size,), 64, 256) / 128.0).to(torch.bfloat16)

    def signs(self, *shape: int) -> Tensor:
        return (self.integers(shape, 0, 2) * 2 - 1).to(torch.bfloat16)

    def permutation(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self.generator)


@pytest.fixture
def grid() -> Grid:
    return Grid()


@pytest.fixture(scope="session")
def make_grid() -> type[Grid]:
    return Grid


def identity_map(slots: int, top_k: int) -> Tensor:
    return torch.arange(slots * top_k, dtype=torch.int32).view(slots, top_k)


def beam_output(grid: Grid, slots: int, top_k: int, hidden_size: int) -> UnfinalizedMoEOutput:
    return UnfinalizedMoEOutput(
        grid.rows(slots * top_k, hidden_size),
        grid.weights(slots, top_k),
        identity_map(slots, top_k),
    )


def arguments(operation: str, *, tokens: int = 3, top_k: int = 2, hidden: int = 256) -> Any:
    """Legal arguments of an operation, by name, for a test to spoil one of them."""
    grid = Grid(seed=7)
    capacity = tokens + 2
    tail: dict[str, Any] = {
        "post_weight": grid.affine(hidden),
        "post_eps": 1e-5,
        "next_weight": grid.affine(hidden),
        "next_eps": 1e-6,
        "scales": (0.75, 1.5),
    }
    workspace = BeamAllReduceWorkspace(
        world_size=1, rank=0, hidden_size=hidden, max_tokens=64, device_group=None
    )
    if operation == "beam_moe_finalize":
        return SimpleNamespace(
            expert_outputs=grid.rows(capacity, top_k, hidden),
            expert_weights=grid.weights(capacity, top_k),
            output=torch.full((tokens, hidden), 3.0, dtype=torch.bfloat16),
            routed_scale=2.5,
            post_weight=tail["post_weight"],
            post_eps=tail["post_eps"],
        )
    residual = grid.rows(tokens, hidden)
    if operation == "beam_norm_residual_norm":
        return SimpleNamespace(x=grid.rows(tokens, hidden), residual=residual, **tail)
    if operation in (
        "beam_moe_finalize_norm_residual_norm",
        "beam_moe_finalize_gather_norm_residual_norm",
    ):
        call = SimpleNamespace(
            x=beam_output(grid, capacity, top_k, hidden),
            residual=residual,
            **tail,
            routed_scale=2.5,
            strategy=None,
        )
        if "gather" in operation:
            call.workspace = workspace
        return call
    output = MoEOutput(
        UnfinalizedMoEOutput(
            grid.rows(capacity * top_k, hidden),
            grid.weights(tokens, top_k, dtype=torch.bfloat16),
            grid.permutation(capacity * top_k)[: tokens * top_k].to(torch.int32).view(tokens, -1),
        ),
        grid.rows(tokens, hidden),
        2.5,
    )
    if operation == "finalize_moe_output":
        return SimpleNamespace(x=output)
    assert operation == "beam_finalize_allreduce_norm_residual_norm"
    return SimpleNamespace(x=output, residual=residual, **tail, workspace=workspace)


@pytest.fixture(scope="session")
def make_arguments() -> Any:
    return arguments


@pytest.fixture(scope="session")
def make_beam_output() -> Any:
    return beam_output


@pytest.fixture(scope="session")
def load_module() -> Any:
    return load
