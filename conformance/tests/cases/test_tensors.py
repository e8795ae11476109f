"""The walk over the tensors of a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moetail.conformance.cases.tensors import mapped, tensors_in
from moetail.spec import MoEOutput, UnfinalizedMoEOutput


@dataclass
class Workspace:
    world_size: int
    hook: Any = None


def call() -> dict[str, Any]:
    one, two, three, four, five = (torch.full((2,), float(number)) for number in range(5))
    return {
        "x": MoEOutput(UnfinalizedMoEOutput(one, two, three), four, 2.5),
        "pair": (None, [five, "text"]),
        "workspace": Workspace(2),
        "scales": (0.5, 1.0),
    }


def test_every_tensor_has_its_dotted_name() -> None:
    assert {name: int(tensor[0]) for name, tensor in tensors_in(call())} == {
        "x.routed.gemm2_permuted": 0,
        "x.routed.expert_weights": 1,
        "x.routed.expanded_idx_to_permuted_idx": 2,
        "x.shared_output": 3,
        "pair[1][0]": 4,
    }
    assert [name for name, _ in tensors_in(call()["pair"])] == ["[1][0]"]
    assert list(tensors_in(Workspace)) == []


def test_a_change_of_every_tensor_leaves_the_given_call_alone() -> None:
    given, seen = call(), []

    def change(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(int(tensor[0]))
        return tensor + 10

    made = mapped(given, change)
    assert seen == [0, 1, 2, 3, 4]
    assert [int(tensor[0]) for _, tensor in tensors_in(made)] == [10, 11, 12, 13, 14]
    assert [int(tensor[0]) for _, tensor in tensors_in(given)] == [0, 1, 2, 3, 4]
    assert type(made["x"].routed) is UnfinalizedMoEOutput
    assert made["x"].routed_scaling_factor == 2.5
    assert isinstance(made["pair"], tuple)
    assert made["pair"][1][1] == "text"


def test_what_holds_no_tensor_stays_the_same_object() -> None:
    given = call()
    made = mapped(given, torch.clone)
    assert made["workspace"] is given["workspace"]
    assert made["scales"] is given["scales"]
