"""FlashInfer's kernel without a GPU: its workspace, its arguments, and what is put around it.

Its arithmetic is imitated in torch, over gloo. Where FlashInfer's own source is at hand, the order
of the arguments is read from it.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moetail.conformance.adapters import ADAPTERS, NotMapped, flashinfer_kernel
from moetail.conformance.adapters.flashinfer_kernel import (
    LIBRARY,
    Exchange,
    communication_bytes,
    compose,
    exchange_for,
    find_library,
    flags,
    launch,
    load_library,
    pointer_table,
    why_not,
)
from moetail.conformance.implementation import UsageError
from moetail.conformance.run.plan import Plan
from moetail.conformance.suite import run_suite
from moetail.reference import Reference
from moetail.spec import ContractError, MoEOutput, UnfinalizedMoEOutput
from moetail.spec.rules import ALLREDUCE

BINDING = (
    "allreduce_in",
    "residual_in",
    "norm_weight",
    "expanded_idx_to_permuted_idx",
    "norm_out",
    "residual_out",
    "quant_out",
    "scale_out",
    "launch_with_pdl",
    "workspace",
    "world_rank",
    "world_size",
    "eps",
    "shared_expert_output",
    "expert_scale_factor",
    "routed_scaling_factor",
    "weight_bias",
)

# What the kernel does, step by step; every step is rounded into BF16.
IMITATION = """
import torch
import torch.distributed as dist

from moetail.conformance.adapters.flashinfer_kernel import compose


def imitation(group):
    def kernel(rows, index, weights, shared, factor, residual, gamma, eps):
        total = torch.zeros_like(residual)
        for k in range(index.shape[1]):
            tokens = (index[:, k] >= 0).nonzero().squeeze(1)
            product = rows[index[tokens, k].long()].float()
            if weights is not None:
                product = product * weights[tokens, k, None].float()
            total[tokens] = (total[tokens].float() + product.bfloat16().float()).bfloat16()
        total = (total.float() * torch.tensor(factor)).bfloat16()
        if shared is not None:
            total = (total.float() + shared.float()).bfloat16()
        parts = [torch.empty_like(total) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, total, group=group)
        summed = parts[0]
        for part in parts[1:]:
            summed = (summed.float() + part.float()).bfloat16()
        hidden = (summed.float() + residual.float()).bfloat16()
        wide = hidden.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return hidden, (wide * inverse * gamma.float()).bfloat16()

    return kernel


def beam_finalize_allreduce_norm_residual_norm(x, residual, *tail, **named):
    workspace = named.pop("workspace")
    return compose(imitation(workspace.device_group), x, residual, *tail, **named)
"""


@pytest.fixture(autouse=True)
def _no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("MOETAIL_FLASHINFER", "MOETAIL_FLASHINFER_LIBRARY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


# --- the workspace --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "tokens", "hidden"),
    [(2, 1, 7168), (2, 512, 7168), (4, 3, 8), (8, 100, 2880), (16, 7, 256)],
)
def test_every_access_of_the_kernel_lies_in_its_buffers(
    ranks: int, tokens: int, hidden: int
) -> None:
    """Over four calls, as LamportComm and the kernel compute addresses, in bytes."""
    size = communication_bytes(ranks, tokens, hidden)
    assert size == ranks * tokens * hidden * 2  # FlashInfer's lamport_comm_size
    starts = [0x10_0000_0000 * (1 + rank) for rank in range(ranks)]
    memory = flags(size)
    table = pointer_table(starts, 0xC000)
    assert len(table) == 3 * ranks + 1
    assert table[3 * ranks] == 0xC000
    vectors = tokens * hidden // 8
    for call in range(4):
        turn = memory[2]
        assert turn == call % 3
        written = turn % 3 * memory[3]
        cleared = (turn + 2) % 3 * memory[3]
        assert cleared < 2**31
        for buffer in range(ranks):
            start = table[2 * ranks + buffer]
            assert start == starts[buffer]
            for rank in range(ranks):
                first = written + rank * vectors * 16
                assert first % 16 == 0
                assert first + vectors * 16 <= 3 * size
            assert cleared + memory[4] * 2 <= 3 * size
        # What is cleared is the whole of what the call before wrote.
        assert not call or (cleared == (call - 1) % 3 * size and memory[4] * 2 == size)
        memory[2], memory[4] = (turn + 1) % 3, tokens * hidden * ranks


def test_one_exchange_serves_all_calls_that_it_has_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []

    def create(cls: type[Exchange], group: Any, size: int) -> Any:
        made.append(size)
        return SimpleNamespace(buffer_bytes=size)

    monkeypatch.setattr(Exchange, "create", classmethod(create))
    monkeypatch.setattr(flashinfer_kernel, "_EXCHANGES", {})
    monkeypatch.setattr(flashinfer_kernel.dist, "get_world_size", lambda group: 8)
    group: Any = SimpleNamespace(group_name="a")
    first = exchange_for(group, 0, 256)
    assert exchange_for(group, 512, 7168) is first
    large = exchange_for(group, 1024, 7168)
    assert exchange_for(group, 512, 7168) is first
    assert exchange_for(group, 1024, 7168) is large
    assert exchange_for(SimpleNamespace(group_name="b"), 1, 256) is not first  # type: ignore[arg-type]
    assert made == [2**26, 2**27, 2**26]


def test_what_the_kernel_is_not_meant_for() -> None:
    def why(tokens: int, hidden: int, ranks: int, on_gpu: bool = True) -> str | None:
        residual: Any = SimpleNamespace(
            shape=(tokens, hidden), is_cuda=on_gpu, device=torch.device("cpu")
        )
        return why_not(residual, ranks)

    assert why(1, 256, 2) is None
    assert why(0, 2880, 8) is None
    assert why(1, 256, 2, on_gpu=False) == "FlashInfer's kernel runs on GPUs, not on cpu"
    assert "for 2, 4, 8, 16 ranks, not for 3" in str(why(1, 256, 3))
    assert "multiples of 8 as H, not 100" in str(why(1, 100, 2))
    assert "need a workspace of more than" in str(why(2**17, 8192, 2))


# --- the arguments --------------------------------------------------------------------------------


def _call(**changes: Any) -> dict[str, Any]:
    """A call by the names of the binding's parameters, with what it returned as "returned"."""
    tokens, hidden = 3, 16
    exchange: Any = SimpleNamespace(table=torch.zeros(7), rank=1, world_size=2)
    given: dict[str, Any] = {
        "rows": torch.zeros(9, hidden, dtype=torch.bfloat16),
        "index": torch.zeros(tokens, 2, dtype=torch.int32),
        "weights": torch.zeros(tokens, 2, dtype=torch.bfloat16),
        "shared": torch.zeros(tokens, hidden, dtype=torch.bfloat16),
        "factor": 2.5,
        "residual": torch.zeros(tokens, hidden, dtype=torch.bfloat16),
        "gamma": torch.ones(hidden, dtype=torch.bfloat16),
        "eps": 1e-5,
        **changes,
    }
    seen: list[Any] = []
    returned = launch(lambda *arguments: seen.extend(arguments), exchange, **given)
    named = dict(zip(BINDING, seen, strict=True))
    return {**named, "given": given, "exchange": exchange, "returned": returned}


def test_arguments_are_in_the_bindings_order() -> None:
    call = _call(dependent=False)
    given = call["given"]
    for name, own in (
        ("allreduce_in", "rows"),
        ("residual_in", "residual"),
        ("norm_weight", "gamma"),
        ("expanded_idx_to_permuted_idx", "index"),
        ("shared_expert_output", "shared"),
        ("expert_scale_factor", "weights"),
        ("routed_scaling_factor", "factor"),
        ("eps", "eps"),
    ):
        assert call[name] is given[own], name
    assert call["workspace"] is call["exchange"].table
    assert (call["world_rank"], call["world_size"]) == (1, 2)
    assert call["launch_with_pdl"] is False
    assert [call[name] for name in ("quant_out", "scale_out", "weight_bias")] == [None] * 3
    hidden, normalized = call["returned"]
    assert call["residual_out"] is hidden
    assert call["norm_out"] is normalized
    assert hidden.shape == normalized.shape == given["residual"].shape
    assert _call()["launch_with_pdl"] is True
    assert _call(weights=None, shared=None)["expert_scale_factor"] is None


def test_the_bindings_order_is_flashinfers() -> None:
    """The order above is that of the source, where :mod:`peers` has taken it out of a wheel."""
    folder = Path(__file__).parents[3] / ".peers" / "flashinfer" / "flashinfer" / "data" / "csrc"
    source = folder / "trtllm_moe_allreduce_fusion.cu"
    if not source.is_file():
        pytest.skip("FlashInfer's source is not at hand")
    found = re.search(
        r"void trtllm_moe_finalize_allreduce_fusion\((.*?)\) \{", source.read_text(), re.DOTALL
    )
    assert found is not None
    names = [part.split()[-1] for part in found[1].split(",")]
    assert tuple(names) == BINDING


# --- what is put around the kernel ----------------------------------------------------------------


class Recorded:
    """A kernel that keeps what it is given and returns numbers of its own."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}

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
        self.given = {name: value for name, value in locals().items() if name != "self"}
        return torch.full_like(residual, 3.0), torch.full_like(residual, 5.0)


def _output(weights: torch.dtype = torch.bfloat16, **fields: Any) -> MoEOutput:
    gen = torch.Generator().manual_seed(1)
    rows = torch.randn(7, 16, generator=gen).bfloat16()
    rows[2] = float("nan")  # no route's
    index = torch.tensor([[0, 6], [-1, 3], [5, 1]], dtype=torch.int32)
    routed = UnfinalizedMoEOutput(rows, torch.rand(3, 2, generator=gen).to(weights), index)
    return MoEOutput(routed, **fields)


RESIDUAL = torch.arange(48).view(3, 16).bfloat16()


def test_what_the_kernel_computes_comes_from_it() -> None:
    kernel = Recorded()
    x = _output(shared_output=RESIDUAL, routed_scaling_factor=2.5)
    gain = torch.full((16,), 2.0, dtype=torch.bfloat16)
    hidden, normalized = compose(kernel, x, RESIDUAL, None, None, gain, 1e-3, None)
    assert bool((hidden == 3.0).all())
    assert normalized is not None
    assert bool((normalized == 5.0).all())
    routed = x.routed
    assert isinstance(routed, UnfinalizedMoEOutput)
    for name, value in {
        "rows": routed.gemm2_permuted,
        "index": routed.expanded_idx_to_permuted_idx,
        "weights": routed.expert_weights,
        "shared": RESIDUAL,
        "residual": RESIDUAL,
        "gamma": gain,
    }.items():
        assert kernel.given[name] is value, name
    assert (kernel.given["factor"], kernel.given["eps"]) == (2.5, 1e-3)
    hidden, normalized = compose(kernel, x, RESIDUAL, None, None, None, None, (1.0, 0.3))
    assert bool((hidden == 3.0).all())
    assert normalized is None
    assert kernel.given["gamma"].tolist() == [1.0] * 16
    scaled = (RESIDUAL.float() * torch.tensor(0.3)).bfloat16()
    assert torch.equal(kernel.given["residual"], scaled)


@pytest.mark.parametrize(("post", "scales"), [(1e-5, None), (None, (0.7, 1.3))])
def test_what_stands_between_the_sum_and_the_residual_is_the_references(
    post: float | None, scales: tuple[float, float] | None
) -> None:
    kernel = Recorded()
    tail = (RESIDUAL, None, post, None, 1e-6, scales)
    made = compose(kernel, _output(), *tail)
    assert not bool(kernel.given["residual"].any())
    summed = torch.full_like(RESIDUAL, 3.0)
    expected = Reference().beam_norm_residual_norm(summed, *tail)
    for mine, theirs in zip(made, expected, strict=True):
        assert mine is not None
        assert theirs is not None
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_that_the_kernel_cannot_read_are_multiplied_before(dtype: torch.dtype) -> None:
    kernel = Recorded()
    x = _output(dtype)
    compose(kernel, x, RESIDUAL, None, None, None, None, None)
    routed = x.routed
    assert isinstance(routed, UnfinalizedMoEOutput)
    given, rows = kernel.given["rows"], routed.gemm2_permuted
    assert kernel.given["weights"] is None
    assert kernel.given["index"] is routed.expanded_idx_to_permuted_idx
    for token, slot in ((0, 0), (0, 1), (1, 1), (2, 0), (2, 1)):
        row = int(routed.expanded_idx_to_permuted_idx[token, slot])
        product = rows[row].float() * routed.expert_weights[token, slot].float()
        assert torch.equal(given[row], product.bfloat16()), (token, slot)
    assert bool(given[2].isnan().all())
    assert torch.equal(given[4], rows[4])


def test_a_finalized_part_has_one_route_a_token() -> None:
    kernel = Recorded()
    compose(kernel, MoEOutput(RESIDUAL), RESIDUAL, None, None, None, None, None)
    assert kernel.given["rows"] is RESIDUAL
    assert kernel.given["index"].tolist() == [[0], [1], [2]]
    assert kernel.given["index"].dtype is torch.int32
    assert kernel.given["weights"] is None


def test_a_rank_without_rows_takes_part() -> None:
    """Else the binding would refuse on this rank alone, and the others would wait for good."""
    kernel = Recorded()
    rows = torch.empty(0, 16, dtype=torch.bfloat16)
    index = torch.full((3, 2), -1, dtype=torch.int32)
    x = MoEOutput(UnfinalizedMoEOutput(rows, torch.ones(3, 2), index))
    compose(kernel, x, RESIDUAL, None, None, None, None, None)
    assert kernel.given["rows"].shape == (1, 16)


def test_rows_past_two_to_the_31_elements_are_not_tried() -> None:
    rows = torch.empty((2**27 + 1, 16), dtype=torch.bfloat16, device="meta")
    index = torch.zeros((1, 1), dtype=torch.int32, device="meta")
    weights = torch.ones((1, 1), dtype=torch.bfloat16, device="meta")
    x = MoEOutput(UnfinalizedMoEOutput(rows, weights, index))
    residual = torch.empty((1, 16), dtype=torch.bfloat16, device="meta")
    with pytest.raises(OverflowError, match="wraps past 2\\^31"):
        compose(Recorded(), x, residual, None, None, None, None, None)


def test_the_suite_names_the_rule_that_the_kernels_arithmetic_breaks(tmp_path: Path) -> None:
    file = tmp_path / "imitation.py"
    file.write_text(IMITATION, encoding="utf-8")
    rules = ("ROUND-1", "ROUND-4", "ROUND-5", "ROUND-6", "ROUND-7")
    results = run_suite(str(file), Plan(ranks=(2,)), operations=[ALLREDUCE], rules=rules)
    assert [trial.rule for trial in results.violations] == ["ROUND-1"]
    (found,) = results.violations
    assert (found.deviations, found.explained) == (("bf16-every-step",), 1.0)
    judged = {trial.rule for trial in results.trials if trial.judged}
    assert judged == set(rules)


def test_refusals_come_before_what_is_not_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer_kernel, "load_library", lambda path: None)
    operation = flashinfer_kernel.mapped(tmp_path)
    group = SimpleNamespace(world_size=2, rank=0, hidden_size=16, max_tokens=3)
    tail = (None, None, None, None, None, group)
    with pytest.raises(NotMapped, match="runs on GPUs, not on cpu"):
        operation(_output(), RESIDUAL, *tail)
    with pytest.raises(ContractError, match=r"DOMAIN-1.*residual"):
        operation(_output(), RESIDUAL.float(), *tail)
    wrong = _output()
    assert isinstance(wrong.routed, UnfinalizedMoEOutput)
    wrong.routed.expanded_idx_to_permuted_idx[0, 0] = 7
    with pytest.raises(ContractError, match="a row below 7"):
        operation(wrong, RESIDUAL, *tail)


UNMAPPED = """
from moetail.conformance.adapters import NotMapped


def beam_finalize_allreduce_norm_residual_norm(*arguments, **named):
    raise NotMapped("it has one rank too many")
"""


@pytest.mark.parametrize("adapter", [True, False])
def test_what_an_adapter_does_not_map_is_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapter: bool
) -> None:
    file = tmp_path / "unmapped.py"
    file.write_text(UNMAPPED, encoding="utf-8")
    if adapter:
        monkeypatch.setitem(ADAPTERS, str(file), "")
    # A trial of one call, and one whose later calls are not reached.
    rules = ["ROUND-1", "RUN-4"]
    results = run_suite(str(file), Plan(ranks=(1,)), operations=[ALLREDUCE], rules=rules)
    assert {trial.rule for trial in results.trials} == set(rules)
    assert results.verdict == ("not judged" if adapter else "violates")
    for trial in results.trials:
        assert "it has one rank too many" in trial.found
        assert trial.status == results.verdict


# --- the library ----------------------------------------------------------------------------------


def test_where_the_library_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_library() is None
    places = [tmp_path / name for name in ("named", "source", "given", ".peers/flashinfer")]
    for place in places:
        place.mkdir(parents=True)
        (place / LIBRARY).touch()
    named, source, given, default = (place / LIBRARY for place in places)
    assert find_library() == default
    assert find_library(given.parent) == given
    monkeypatch.setenv("MOETAIL_FLASHINFER", str(source.parent))
    assert find_library(given.parent) == source
    monkeypatch.setenv("MOETAIL_FLASHINFER_LIBRARY", str(named))
    assert find_library(given.parent) == named
    monkeypatch.setenv("MOETAIL_FLASHINFER_LIBRARY", str(tmp_path / "none.so"))
    with pytest.raises(UsageError, match=r"MOETAIL_FLASHINFER_LIBRARY: there is no file .*none"):
        find_library()


def test_a_file_that_is_no_library_is_usage(tmp_path: Path) -> None:
    file = tmp_path / LIBRARY
    file.write_text("no library", encoding="utf-8")
    with pytest.raises(UsageError, match=f"{LIBRARY} cannot be loaded .*; allowed: a library"):
        load_library(file)
