"""The kernels on a GPU against a float64 oracle of this file: values, reads and writes, replays.

The oracle is independent of the reference. Values are on grids where every order of the FP32 sum
gives the same bits, so finalized rows and hidden have one right answer each; a norm has its 2^-16.
Whether a token's bits depend on the batch is tried on values where another order gives other bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import moetail.kernels as kernels
from moetail.conformance.dumps import capture, judge_files
from moetail.conformance.run.results import CONFORMS
from moetail.kernels import operators
from moetail.spec import MoEOutput, UnfinalizedMoEOutput, checks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE = "cuda"
EPS = 1e-5
# Every kernel and every division of a token: few and many tokens, H of one and of 32 chunks.
SHAPES = [
    (tokens, hidden, top_k)
    for (hidden, top_k), tokens in itertools.product(
        [(256, 1), (2048, 10), (3072, 3), (4096, 2), (5120, 8), (7168, 8), (7936, 17), (8192, 32)],
        [1, 5, 40, 70, 300],
    )
] + [
    (600, 7168, 8),
    (20, 4096, 2),
    (600, 4096, 1),
    # Many tokens whose rows end within a block's last vectors: what lies behind must stay zero.
    (640, 256, 2),
    (640, 1280, 4),
    (1000, 768, 3),
]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def grid(*shape: int, scale: float = 2.0**-3, most: int = 15) -> Tensor:
    """Small multiples of ``scale`` in BF16: sums and products of them are exact in FP32."""
    values = torch.randint(-most, most + 1, shape, device=DEVICE)
    return (values * scale).to(torch.bfloat16)


def rounded(value: Tensor) -> Tensor:
    """RN of a float64 tensor, in float64: one rounding, to nearest, ties to even."""
    mantissa, exponent = torch.frexp(value)
    exponent = exponent.clamp(min=-125)  # BF16's subnormals share the smallest exponent
    unit = ((exponent.long() - 8 + 1023) << 52).view(torch.float64)  # 2^(exponent - 8)
    return torch.where(value.isfinite(), (value / unit).round() * unit, value) + 0 * mantissa


def reduced(rows: Tensor, weights: Tensor, index: Tensor, scale: float) -> Tensor:
    """RN(RN(sum over live routes) * scale) in float64; rows of dead routes are not looked at."""
    total = torch.zeros(index.shape[0], rows.shape[1], dtype=torch.float64, device=DEVICE)
    for slot in range(index.shape[1]):
        (live,) = (index[:, slot] >= 0).nonzero(as_tuple=True)
        total[live] += weights[live, slot, None].double() * rows[index[live, slot]].double()
    return rounded(rounded(total) * scale)


def normed(value: Tensor, weight: Tensor | None) -> Tensor:
    """The norm in float64, not rounded."""
    result = value / (value.square().mean(-1, keepdim=True) + EPS).sqrt()
    return result if weight is None else result * weight.double()


def assert_norm(found: Tensor, value: Tensor, weight: Tensor | None) -> None:
    """Each element is RN of a value within 2^-15 of the exact norm: 2^-16, and FP32's share."""
    exact = normed(value, weight)
    slack = exact.abs() * 2.0**-15
    assert bool((found.double() >= rounded(exact - slack)).all())
    assert bool((found.double() <= rounded(exact + slack)).all())


class Guarded:
    """Tensors that lie between canaries; NaN until written."""

    ZONE = 4096

    def __init__(self) -> None:
        self.buffers: list[tuple[Tensor, Tensor]] = []

    def empty(self, like: Tensor, shift: int = 0) -> Tensor:
        count = like.numel()
        buffer = torch.full(
            (count + 2 * self.ZONE + 8,), -77.0, dtype=torch.bfloat16, device=DEVICE
        )
        inside = buffer[self.ZONE + shift : self.ZONE + shift + count]
        inside.fill_(float("nan"))
        self.buffers.append((buffer, inside))
        return inside.view(like.shape)

    def copy(self, tensor: Tensor, shift: int = 0) -> Tensor:
        return self.empty(tensor, shift).copy_(tensor)

    def check(self) -> None:
        for buffer, inside in self.buffers:
            before = (inside.data_ptr() - buffer.data_ptr()) // 2
            outside = torch.cat((buffer[:before], buffer[before + inside.numel() :]))
            assert bool((outside == -77.0).all()), "written outside a tensor"
            assert not bool(inside.isnan().any()), "an element was not written"


@pytest.mark.parametrize(("tokens", "hidden", "top_k"), SHAPES)
def test_finalize(tokens: int, hidden: int, top_k: int) -> None:
    capacity = tokens + 2
    rows, weights = grid(capacity, top_k, hidden), grid(capacity, top_k).float()
    rows[tokens:] = float("nan")
    weights[tokens:] = float("nan")
    guarded = Guarded()
    output = guarded.empty(rows[:tokens, 0])
    inputs = rows.clone(), weights.clone()
    kernels.beam_moe_finalize(rows, weights, output, 1.375)
    identity = torch.arange(tokens * top_k, device=DEVICE).view(tokens, top_k)
    expected = reduced(rows.flatten(0, 1), weights, identity, 1.375)
    assert torch.equal(output.double(), expected)
    guarded.check()
    for before, after in zip(inputs, (rows, weights), strict=True):
        assert torch.equal(before.nan_to_num(7.0), after.nan_to_num(7.0))


@pytest.mark.parametrize(("tokens", "hidden", "top_k"), SHAPES)
@pytest.mark.parametrize("options", ["all", "no affine", "no post", "no next", "post only"])
def test_fused(tokens: int, hidden: int, top_k: int, options: str) -> None:
    rows, weights = grid((tokens + 1) * top_k, hidden), grid(tokens + 1, top_k).float()
    rows[tokens * top_k :] = float("nan")
    index = torch.arange((tokens + 1) * top_k, dtype=torch.int32, device=DEVICE)
    x = UnfinalizedMoEOutput(rows, weights, index.view(tokens + 1, top_k))
    residual, post, following = grid(tokens, hidden), grid(hidden), grid(hidden)
    affine = options != "no affine"
    finalized = reduced(rows, weights, x.expanded_idx_to_permuted_idx[:tokens].long(), 0.75)
    post_weight = post if affine and options != "no post" else None
    post_eps = None if options == "no post" else EPS
    if options == "post only":
        output = torch.full_like(residual, float("nan"))
        kernels.beam_moe_finalize(
            rows.view(-1, top_k, hidden), weights, output, 0.75, post_weight, post_eps
        )
        assert_norm(output, finalized, post_weight)
        return
    next_weight = following if affine and options != "no next" else None
    next_eps = None if options == "no next" else EPS
    scales = (0.625, 1.5)
    arguments = (x, residual, post_weight, post_eps, next_weight, next_eps, scales, 0.75)
    hidden_out, normalized = kernels.beam_moe_finalize_norm_residual_norm(*arguments)
    if post_eps is None:
        expected = rounded(rounded(finalized * scales[0]) + rounded(residual.double() * scales[1]))
        assert torch.equal(hidden_out.double(), expected)
    else:
        # From the kernel's own post-norm, which test_finalize and "post only" judge.
        n = torch.full_like(residual, float("nan"))
        kernels.beam_moe_finalize(
            rows.view(-1, top_k, hidden), weights, n, 0.75, post_weight, post_eps
        )
        expected = rounded(rounded(n.double() * scales[0]) + rounded(residual.double() * scales[1]))
        assert torch.equal(hidden_out.double(), expected)
    if next_eps is None:
        assert normalized is None
    else:
        assert normalized is not None
        assert_norm(normalized, hidden_out.double(), next_weight)
    # Run after run the same bits, and in two kernels.
    again = kernels.beam_moe_finalize_norm_residual_norm(*arguments)
    apart = kernels.beam_moe_finalize_norm_residual_norm(*arguments, strategy="unfused")
    assert torch.equal(again[0], hidden_out)
    assert torch.equal(apart[0], hidden_out)
    if normalized is not None:
        assert again[1] is not None
        assert apart[1] is not None
        assert torch.equal(again[1], normalized)
        assert torch.equal(apart[1], normalized)


@pytest.mark.parametrize(
    ("tokens", "hidden"), [(1, 7168), (40, 4096), (200, 7168), (300, 7168), (900, 8192)]
)
@pytest.mark.parametrize("scales", [None, (0.625, 1.5)])
def test_boundary(tokens: int, hidden: int, scales: tuple[float, float] | None) -> None:
    x, residual, weight = grid(tokens, hidden), grid(tokens, hidden), grid(hidden)
    hidden_out, normalized = kernels.beam_norm_residual_norm(
        x, residual, None, None, weight, EPS, scales
    )
    x_scale, r_scale = scales or (1.0, 1.0)
    expected = rounded(rounded(x.double() * x_scale) + rounded(residual.double() * r_scale))
    assert torch.equal(hidden_out.double(), expected)
    assert normalized is not None
    assert_norm(normalized, hidden_out.double(), weight)
    post, _ = kernels.beam_norm_residual_norm(x, torch.zeros_like(x), weight, EPS, None, None, None)
    assert_norm(post, x.double(), weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 7168, 8), (37, 2048, 10), (300, 4096, 2), (5, 77, 40)])
@pytest.mark.parametrize("shared", [False, True])
def test_permuted_with_remote_routes(
    dtype: torch.dtype, shape: tuple[int, int, int], shared: bool
) -> None:
    tokens, hidden, top_k = shape
    padded = tokens * top_k + 19
    index = torch.randperm(padded, device=DEVICE)[: tokens * top_k].int().view(tokens, top_k)
    remote = torch.rand(tokens, top_k, device=DEVICE) < 0.4
    remote[-1] = True  # a token with no local route at all
    index[remote] = -1
    rows = torch.full((padded, hidden), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    named = index[index >= 0].long()
    rows[named] = grid(len(named), hidden)
    weights = grid(tokens, top_k).to(dtype)
    weights[remote] = float("nan")
    part = grid(tokens, hidden) if shared else None
    found = kernels.finalize_moe_output(
        MoEOutput(UnfinalizedMoEOutput(rows, weights, index), part, 0.75)
    )
    expected = reduced(rows, weights, index.long(), 0.75)
    if part is not None:
        expected = rounded(expected + part.double())
    assert torch.equal(found.double(), expected)
    again = torch.randperm(padded, device=DEVICE)
    inverse = torch.empty_like(again)
    inverse[again] = torch.arange(padded, device=DEVICE)
    moved = torch.where(index >= 0, inverse[index.clamp(min=0).long()].int(), -1)
    x = UnfinalizedMoEOutput(rows[again].contiguous(), weights, moved)
    assert torch.equal(kernels.finalize_moe_output(MoEOutput(x, part, 0.75)), found)


@pytest.mark.parametrize("shift", [0, 1, 3])
def test_any_address_and_nothing_outside(shift: int) -> None:
    tokens, hidden, top_k = 6, 1024, 4
    guarded = Guarded()
    rows = guarded.copy(grid(tokens * top_k, hidden), shift)
    residual = guarded.copy(grid(tokens, hidden), shift)
    weight = guarded.copy(grid(hidden), shift)
    weights = grid(tokens, top_k).float()
    index = torch.arange(tokens * top_k, dtype=torch.int32, device=DEVICE).view(tokens, top_k)
    output = guarded.empty(residual, shift)
    kernels.beam_moe_finalize(rows.view(tokens, top_k, hidden), weights, output, 0.75)
    assert torch.equal(output.double(), reduced(rows, weights, index.long(), 0.75))
    x = UnfinalizedMoEOutput(rows, weights, index)
    found = kernels.beam_moe_finalize_norm_residual_norm(
        x, residual, weight, EPS, weight, EPS, (0.5, 1.0), 0.75
    )
    straight = kernels.beam_norm_residual_norm(
        output.clone(), residual.clone(), weight.clone(), EPS, weight.clone(), EPS, (0.5, 1.0)
    )
    for a, b in zip(found, straight, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)
    guarded.check()


def bits(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.view(torch.int16)


def sizes(most: int) -> Iterator[int]:
    """All up to 16, then in steps of a sixteenth: some lie between any two changes of a plan."""
    tokens = 1
    while tokens <= most:
        yield tokens
        tokens += max(1, tokens // 16)


@pytest.mark.parametrize(
    ("hidden", "top_k"),
    [
        *((7168, 8), (7168, 1), (5120, 8), (4096, 8), (4096, 2), (2048, 10)),
        *((1280, 4), (256, 1), (7936, 17), (8192, 32)),
    ],
)
def test_bits_of_a_token_depend_on_nothing_else(hidden: int, top_k: int) -> None:
    """Not on the number of tokens, its place, the capacity, the strategy or the address."""
    most = min(4096, 2**28 // (hidden * top_k))
    rows = torch.randn(most, top_k, hidden, device=DEVICE).bfloat16()
    rows[:, :, ::5] = 0.0  # so that there are zeros, of both signs
    weights = torch.rand(most, top_k, device=DEVICE) - 0.25
    residual = torch.randn(most, hidden, device=DEVICE).bfloat16()
    residual[:, ::10] = -0.0
    post, following = (torch.randn(hidden, device=DEVICE).bfloat16() for _ in range(2))

    def moved(tensor: Tensor) -> Tensor:
        """To an odd address."""
        return torch.cat((tensor.new_zeros(1), tensor.flatten()))[1:].view(tensor.shape)

    def results(tokens: Tensor, capacity: int, strategy: str = "fused", odd: bool = False) -> Any:
        padded = torch.full((capacity, top_k, hidden), float("nan"), device=DEVICE).bfloat16()
        padded[: len(tokens)] = rows[tokens]
        slots = torch.full((capacity, top_k), float("nan"), device=DEVICE)
        slots[: len(tokens)] = weights[tokens]
        index = torch.arange(capacity * top_k, dtype=torch.int32, device=DEVICE)
        x = UnfinalizedMoEOutput(padded.view(-1, hidden), slots, index.view(capacity, top_k))
        others = [residual[tokens], post, EPS, following, EPS]
        if odd:
            others = [moved(o) if isinstance(o, Tensor) else o for o in others]
        fused = kernels.beam_moe_finalize_norm_residual_norm(
            x, *others, (0.75, 1.25), -1.5, strategy=strategy
        )
        finalized = torch.empty_like(residual[tokens])
        kernels.beam_moe_finalize(padded, slots, finalized, -1.5, post, EPS)
        return *fused, finalized, *kernels.beam_norm_residual_norm(finalized, *others, None)

    def assert_same(found: Any, tokens: Tensor, what: str) -> None:
        for made, all_made in zip(found, expected, strict=True):
            different = int((bits(made) != bits(all_made)[tokens]).sum())
            assert different == 0, f"{different} elements of T = {len(tokens)}, {what}"

    everything = torch.arange(most, device=DEVICE)
    expected = results(everything, most)
    # The first ones against the oracle, from the kernel's own hidden.
    assert_norm(expected[1][:64], expected[0][:64].double(), following)
    assert_norm(expected[4][:64], expected[3][:64].double(), following)
    for tokens in sizes(most):
        some = torch.randperm(most, device=DEVICE)[:tokens]
        assert_same(results(some, tokens), some, "anywhere")
        if tokens < 64 or tokens % 7 == 0:
            assert_same(results(some, tokens + 3), some, "among more slots")
            assert_same(results(some, tokens, "unfused"), some, "in two kernels")
            assert_same(results(some, tokens, odd=True), some, "at odd addresses")


@pytest.mark.parametrize("hidden", [1, 77, 333, 9000])
def test_bits_of_any_width_depend_on_nothing_else(hidden: int) -> None:
    most = 600
    x, residual = (torch.randn(most, hidden, device=DEVICE).bfloat16() for _ in range(2))
    weight = torch.randn(hidden, device=DEVICE).bfloat16()
    tail = (weight, EPS, weight, EPS, (0.75, 1.25))
    expected = kernels.beam_norm_residual_norm(x, residual, *tail)
    for tokens in sizes(most):
        some = torch.randperm(most, device=DEVICE)[:tokens]
        found = kernels.beam_norm_residual_norm(x[some], residual[some], *tail)
        for made, all_made in zip(found, expected, strict=True):
            assert torch.equal(bits(made), bits(all_made)[some])


class Observed(TorchDispatchMode):
    """Does nothing, but that calls must come by."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_eager_calls_ask_neither_the_checks_nor_the_dispatcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens, hidden, top_k = 5, 512, 2
    rows, weights = grid(tokens * top_k, hidden), grid(tokens, top_k).float()
    index = torch.arange(tokens * top_k, dtype=torch.int32, device=DEVICE).view(tokens, top_k)
    x = UnfinalizedMoEOutput(rows, weights, index)
    residual, weight = grid(tokens, hidden), torch.nn.Parameter(grid(hidden), requires_grad=False)
    slots = rows.view(tokens, top_k, hidden)
    (workspace,) = kernels.BeamAllReduceWorkspace.virtual(1, hidden, 8)
    tails: list[tuple[Any, ...]] = [
        (weight, EPS, weight, EPS, (0.5, 2)),
        (None, EPS, None, 0, None),
        (None, None, weight, None, None),
    ]
    calls: list[Callable[[], Any]] = []
    for tail in tails:
        calls += [
            lambda t=tail: kernels.beam_moe_finalize(
                slots, weights, torch.empty_like(residual), 2, *t[:2]
            ),
            lambda t=tail: kernels.beam_norm_residual_norm(residual, residual, *t),
            lambda t=tail: kernels.beam_moe_finalize_norm_residual_norm(x, residual, *t),
            lambda t=tail: kernels.beam_moe_finalize_gather_norm_residual_norm(
                x, residual, *t, workspace
            ),
            lambda t=tail: kernels.beam_moe_finalize_gather_norm_residual_norm(
                x, residual, *t, workspace, 2, strategy="twoshot"
            ),
            lambda t=tail: kernels.beam_finalize_allreduce_norm_residual_norm(
                MoEOutput(x, residual, 1.5), residual, *t, workspace
            ),
        ]
    calls += [
        lambda: kernels.finalize_moe_output(MoEOutput(x, residual, 1.5)),
        lambda: kernels.finalize_moe_output(MoEOutput(residual, residual, 2)),
    ]
    with Observed():
        expected = [call() for call in calls]
    for module, prefix in ((checks, "check"), (operators, "finalize"), (operators, "boundary")):
        for name in dir(module):
            if name.startswith(prefix):
                monkeypatch.setattr(module, name, None)
    for call, results in zip(calls, expected, strict=True):
        found = call()
        if isinstance(found, Tensor):
            found, results = (found,), (results,)
        for a, b in zip(found, results, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(bits(a), bits(b))


def test_odd_hidden_size() -> None:
    x, residual, weight = grid(7, 333), grid(7, 333), grid(333)
    hidden, normalized = kernels.beam_norm_residual_norm(
        x, residual, None, None, weight, EPS, (0.5, 1.5)
    )
    expected = rounded(rounded(x.double() * 0.5) + rounded(residual.double() * 1.5))
    assert torch.equal(hidden.double(), expected)
    assert normalized is not None
    assert_norm(normalized, hidden.double(), weight)


@pytest.mark.parametrize("special", [float("nan"), float("inf"), float("-inf")])
def test_specials_of_live_routes_propagate(special: float) -> None:
    rows, weights = grid(8, 512), torch.ones(2, 4, device=DEVICE)
    rows[1, 5] = special
    output = torch.zeros(2, 512, dtype=torch.bfloat16, device=DEVICE)
    kernels.beam_moe_finalize(rows.view(2, 4, 512), weights, output)
    assert bool(output[0, 5].isnan()) if special != special else bool(output[0, 5] == special)
    output[0, 5] = 0
    assert bool(output.isfinite().all())


def test_subnormals_count() -> None:
    rows = torch.full((2, 2, 256), 2.0**-130, dtype=torch.bfloat16, device=DEVICE)
    output = torch.zeros(2, 256, dtype=torch.bfloat16, device=DEVICE)
    kernels.beam_moe_finalize(rows, torch.ones(2, 2, device=DEVICE), output)
    assert bool((output.double() == 2.0**-129).all())


@pytest.mark.parametrize("tokens", [1, 8, 60, 300])
def test_graph_with_inputs_changed_between_replays(tokens: int) -> None:
    hidden, top_k = 7168, 8
    rows, weights = grid(tokens * top_k, hidden), grid(tokens, top_k).float()
    index = torch.arange(tokens * top_k, dtype=torch.int32, device=DEVICE).view(tokens, top_k)
    residual, weight = grid(tokens, hidden), grid(hidden)
    x = UnfinalizedMoEOutput(rows, weights, index)

    def step() -> tuple[Tensor, ...]:
        a = kernels.beam_moe_finalize_norm_residual_norm(
            x, residual, weight, EPS, weight, EPS, None, 0.5
        )
        b = kernels.beam_norm_residual_norm(a[1], a[0], weight, EPS, weight, EPS, (0.5, 1.0))
        c = kernels.finalize_moe_output(MoEOutput(x, b[1], 0.5))
        return (*a, *b, c)

    step()
    stream, other, graph = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        first = step()
        other.wait_stream(stream)
        with torch.cuda.stream(other):
            second = step()
        residual.add_(0)  # a kernel that knows nothing of dependent launch
        third = step()
        stream.wait_stream(other)
    for _ in range(3):
        rows.copy_(grid(tokens * top_k, hidden))
        weights.copy_(grid(tokens, top_k))
        residual.copy_(grid(tokens, hidden))
        graph.replay()
        torch.cuda.synchronize()
        expected = step()
        for captured in (first, second, third):
            for a, b in zip(captured, expected, strict=True):
                assert torch.equal(a, b)


def test_another_stream_and_a_refusal_between() -> None:
    rows, weights = grid(4, 8, 7168), grid(4, 8).float()
    output = torch.empty(4, 7168, dtype=torch.bfloat16, device=DEVICE)
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        kernels.beam_moe_finalize(rows, weights, output)
        before = output.clone()
        with pytest.raises(ValueError, match="DOMAIN-1"):
            kernels.beam_moe_finalize(rows, weights.double(), output)
        assert torch.equal(before, output)
    torch.cuda.synchronize()


def big() -> Iterator[int]:
    free, _ = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
    yield from ([7168] if free > 24 * 2**30 else [])


def test_captured_calls_are_judged_without_the_gpu(tmp_path: Path) -> None:
    tokens, hidden, top_k = 37, 2048, 10
    x = UnfinalizedMoEOutput(
        grid(tokens * top_k, hidden),
        grid(tokens, top_k).float(),
        torch.arange(tokens * top_k, dtype=torch.int32, device=DEVICE).view(tokens, top_k),
    )
    residual, weight = grid(tokens, hidden), grid(hidden)

    def call() -> tuple[Tensor, Tensor | None]:
        return kernels.beam_moe_finalize_norm_residual_norm(
            x, residual, weight, EPS, weight, EPS, (0.625, 1.5), 0.75
        )

    call()
    torch.cuda.synchronize()
    with capture(tmp_path, kernels, tokens=[0, 36], calls=range(3)) as made:
        call()
        graph = torch.cuda.CUDAGraph()
        with (
            pytest.warns(UserWarning, match="call 1 of .* is not saved: a CUDA graph"),
            torch.cuda.graph(graph),
        ):
            call()
        graph.replay()
        call()
    assert len(made.files) == 2
    results = judge_files(made.files)
    assert results.verdict == CONFORMS, results.violations
    assert results.judged >= 2 * 2 * 2 * hidden


@pytest.mark.parametrize("hidden", list(big()))
def test_past_two_to_the_31_elements(hidden: int) -> None:
    count = 2**31 // hidden + 64
    rows = torch.full((count, hidden), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    rows[-8:] = grid(8, hidden)
    index = torch.arange(count - 8, count, dtype=torch.int32, device=DEVICE).view(1, 8)
    weights = grid(1, 8).float()
    found = kernels.finalize_moe_output(MoEOutput(UnfinalizedMoEOutput(rows, weights, index)))
    assert torch.equal(found.double(), reduced(rows, weights, index.long(), 1.0))
    # The last token of a fused call whose rows, residual and outputs are all past it.
    del found
    residual = torch.full((count, hidden), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    residual[-1] = grid(hidden)
    x = UnfinalizedMoEOutput(
        rows,
        torch.ones(count, 1, device=DEVICE),
        torch.arange(count, dtype=torch.int32, device=DEVICE).view(count, 1),
    )
    hidden_out, _ = kernels.beam_moe_finalize_norm_residual_norm(
        x, residual, None, None, None, None, None
    )
    expected = rounded(rows[-1].double() + residual[-1].double())
    assert torch.equal(hidden_out[-1].double(), expected)


def test_opcheck_and_compile_on_the_gpu() -> None:
    rows, weights = grid(12, 256), grid(3, 4).float()
    index = torch.arange(12, dtype=torch.int32, device=DEVICE).view(3, 4)
    residual, weight = grid(3, 256), grid(256)
    torch.library.opcheck(
        operators.finalize_boundary,
        (rows, weights, index, residual, weight, EPS, weight, EPS, 0.5, 1.0, 2.0),
    )
    torch.library.opcheck(operators.finalize, (rows, weights, index, residual, 2.0))

    def layer(rows: Tensor, residual: Tensor) -> Tensor:
        x = UnfinalizedMoEOutput(rows * 2, weights, index)
        hidden, normalized = kernels.beam_moe_finalize_norm_residual_norm(
            x, residual, weight, EPS, weight, EPS, (0.5, 1.0)
        )
        assert normalized is not None
        return hidden + kernels.finalize_moe_output(MoEOutput(x, normalized, 0.5))

    compiled = torch.compile(layer, fullgraph=True)
    assert torch.equal(layer(rows, residual), compiled(rows, residual))
