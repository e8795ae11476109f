"""Several ranks on one GPU: every rank's result judged, replicas compared, and lost ranks named."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import moetail.kernels as kernels
from moetail.conformance.cases import Case
from moetail.conformance.cases.tensors import tensors_in
from moetail.conformance.judge import judge
from moetail.kernels import BeamAllReduceWorkspace, ExchangeError
from moetail.spec import ContractError, MoEOutput, UnfinalizedMoEOutput

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GATHER = "beam_moe_finalize_gather_norm_residual_norm"
ALLREDUCE = "beam_finalize_allreduce_norm_residual_norm"
CALLS = ("oneshot", "twoshot", "unfused", ALLREDUCE)
MAX_TOKENS = 700
DEADLINE = 5.0


@functools.cache
def workspaces_of(ranks: int, hidden: int) -> list[BeamAllReduceWorkspace]:
    """One set for all tests: any sequence of calls is right (RUN-5)."""
    made = BeamAllReduceWorkspace.virtual(ranks, hidden, MAX_TOKENS)
    for workspace in made:
        workspace.deadline_s = DEADLINE
    return made


@functools.cache
def streams(ranks: int) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream() for _ in range(ranks)]


@pytest.fixture(autouse=True, scope="module")
def loaded() -> None:
    """All kernels are loaded before one waits: loading may wait for the GPU to be idle."""
    if not torch.cuda.is_available():
        return
    for hidden, tokens in ((256, 1), (2048, 1), (2048, 300)):
        for top_k in (1, 2):
            for call in CALLS:
                case = case_of(call, 1, tokens, hidden, top_k=top_k)
                run(case, workspaces_of(1, hidden))


def case_of(call: str, ranks: int, tokens: int, hidden: int, **options: Any) -> Case:
    fixed: dict[str, Any] = {"post": "affine", "next": "affine", "scales": (0.75, 1.25)}
    fixed |= {"routed_scale": 2.5, **options}
    if call != ALLREDUCE:
        return Case(GATHER, tokens=tokens, hidden=hidden, ranks=ranks, strategy=call, **fixed)
    return Case(ALLREDUCE, tokens=tokens, hidden=hidden, ranks=ranks, **fixed)


def together(ranks: int, call: Callable[[int], Any]) -> list[Any]:
    """Each rank's call on its own stream."""
    torch.cuda.synchronize()
    results = []
    for rank, stream in enumerate(streams(ranks)):
        with torch.cuda.stream(stream):
            results.append(call(rank))
    torch.cuda.synchronize()
    return results


def run(case: Case, workspaces: list[BeamAllReduceWorkspace]) -> tuple[list[Any], list[Any]]:
    calls = [case.arguments(rank, "cuda") for rank in range(case.ranks)]
    return calls, run_with(case, calls, workspaces)


def run_with(case: Case, calls: list[Any], workspaces: list[BeamAllReduceWorkspace]) -> list[Any]:
    function = getattr(kernels, case.operation)
    return together(case.ranks, lambda rank: function(**calls[rank], workspace=workspaces[rank]))


def assert_conforms(case: Case, calls: list[Any], results: list[Any]) -> None:
    verdict = judge(case.operation, calls, results)
    assert verdict.conforms, f"{case.id}: {verdict.describe()}"
    for result in results[1:]:
        for mine, other in zip(results[0], result, strict=True):
            assert (mine is None) == (other is None)
            if mine is not None:
                assert torch.equal(mine.view(torch.int16), other.view(torch.int16)), case.id


def check(case: Case) -> None:
    workspaces = workspaces_of(case.ranks, case.hidden)
    assert_conforms(case, *run(case, workspaces))
    for workspace in workspaces:
        workspace.check()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("call", CALLS)
def test_tokens(call: str, ranks: int) -> None:
    """Fewer tokens than ranks, uneven ones, one a block, several a block."""
    for tokens in (1, ranks + 1, 3 * ranks - 1, 61, 640):
        check(case_of(call, ranks, tokens, 256, top_k=8))
        check(case_of(call, ranks, tokens, 2048, top_k=1 if tokens == 61 else 10))


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("hidden", [4608, 7168, 7936, 8192])
def test_wide_rows(call: str, ranks: int, hidden: int) -> None:
    for tokens in (1, 5, 40, 300 if ranks == 8 else 500):
        check(case_of(call, ranks, tokens, hidden, top_k=8))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("post", ["none", "norm", "affine"])
@pytest.mark.parametrize("following", ["none", "norm", "affine"])
def test_options(call: str, post: str, following: str) -> None:
    for tokens, scales in ((3, None), (200, (0.5, 1.5))):
        check(case_of(call, 3, tokens, 2048, post=post, next=following, scales=scales, top_k=3))


@pytest.mark.parametrize("strategy", ["oneshot", "twoshot"])
@pytest.mark.parametrize("top_k", [1, 3, 10])
@pytest.mark.parametrize(("post", "following"), [("none", "affine"), ("norm", "none")])
def test_options_where_blocks_are_divided(
    strategy: str, top_k: int, post: str, following: str
) -> None:
    """Senders and receivers sum up a token differently, and must end with the same bits."""
    check(case_of(strategy, 3, 400, 4608, post=post, next=following, top_k=top_k))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("source", ["zeros", "nan", "inf", "subnormal", "huge"])
def test_values(call: str, source: str) -> None:
    for tokens in (5, 300):
        check(case_of(call, 2, tokens, 256, source=source, top_k=2))


@pytest.mark.parametrize("options", [{"weights": "bf16"}, {"weights": "fp16"}, {"local": 0.5}])
@pytest.mark.parametrize("layout", ["permuted", "route_major"])
def test_routes_of_an_allreduce(options: dict[str, Any], layout: str) -> None:
    for tokens, top_k in ((5, 4), (300, 9)):
        check(
            case_of(ALLREDUCE, 4, tokens, 2048, top_k=top_k, layout=layout, shared=True, **options)
        )


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("hidden", [1, 100, 513, 4097])
def test_any_width_of_an_allreduce(ranks: int, hidden: int) -> None:
    for tokens in (1, 5, 60):
        check(case_of(ALLREDUCE, ranks, tokens, hidden, top_k=3, shared=True))


def test_finalized_part_of_an_allreduce() -> None:
    for tokens in (5, 300):
        check(case_of(ALLREDUCE, 4, tokens, 2048, routed="finalized", shared=True))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("call", CALLS)
def test_payload_of_negative_zeros(call: str, ranks: int) -> None:
    """A finalized row of nothing but -0.0 would be "empty" on the wire (RUN-7)."""
    for tokens in (4, 300):
        case = case_of(call, ranks, tokens, 256, post="none", scales=None, routed_scale=-1.0)
        calls = [case.arguments(rank, "cuda") for rank in range(ranks)]
        for arguments in calls:
            x = arguments["x"]
            (x if call != ALLREDUCE else x.routed).gemm2_permuted.zero_()
            arguments["residual"].fill_(-0.0)
        workspaces = workspaces_of(ranks, 256)
        assert_conforms(case, calls, run_with(case, calls, workspaces))
        workspaces[0].check()


def spread(ranks: int, x: UnfinalizedMoEOutput) -> list[UnfinalizedMoEOutput]:
    """Each rank's own tokens of a batch; what lies behind them is NaN."""
    hidden, (tokens, top_k) = x.gemm2_permuted.shape[1], x.expert_weights.shape
    slots = -(-tokens // ranks)
    parts = []
    for rank in range(ranks):
        own = slice(min(rank * slots, tokens), min((rank + 1) * slots, tokens))
        rows = torch.full((slots, top_k, hidden), float("nan"), device="cuda").bfloat16()
        weights = torch.full((slots, top_k), float("nan"), device="cuda")
        rows[: own.stop - own.start] = x.gemm2_permuted.view(-1, top_k, hidden)[own]
        weights[: own.stop - own.start] = x.expert_weights[own]
        index = torch.arange(slots * top_k, dtype=torch.int32, device="cuda").view(slots, top_k)
        parts.append(UnfinalizedMoEOutput(rows.view(-1, hidden), weights, index))
    return parts


def assert_same_bits(found: Any, expected: Any, what: str) -> None:
    for a, b in zip(found, expected, strict=True):
        different = int((a.view(torch.int16) != b.view(torch.int16)).sum())
        assert different == 0, f"{different} elements of {what}"


def sizes(most: int) -> Iterator[int]:
    tokens = 1
    while tokens <= most:
        yield tokens
        tokens += max(1, tokens // 4)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("hidden", [256, 2048, 4608, 7168])
def test_bits_depend_neither_on_strategy_nor_on_ranks(ranks: int, hidden: int) -> None:
    """Those of one GPU without an exchange, zeros' signs too, at any number of tokens."""
    torch.manual_seed(ranks)
    top_k, most = 3, 500
    rows = torch.randn(most, top_k, hidden, device="cuda").bfloat16()
    rows[..., ::5] = 0.0
    rows[2, 1] = torch.tensor(-1, dtype=torch.int16).view(torch.bfloat16)  # NaN, all bits set
    weights = torch.rand(most, top_k, device="cuda")
    index = torch.arange(most * top_k, dtype=torch.int32, device="cuda").view(most, top_k)
    residual = torch.randn(most, hidden, device="cuda").bfloat16()
    residual[:, ::10] = -0.0
    weight = torch.randn(hidden, device="cuda").bfloat16()
    tails = [(weight, 1e-5, weight, 1e-5, (0.75, 1.25)), (None, None, weight, 1e-5, None)]
    workspaces = workspaces_of(ranks, hidden)

    def gathered(x: UnfinalizedMoEOutput, here: Tensor, tail: Any, strategy: str) -> list[Any]:
        parts = spread(ranks, x)
        return together(
            ranks,
            lambda rank: kernels.beam_moe_finalize_gather_norm_residual_norm(
                parts[rank], here, *tail, workspaces[rank], -1.5, strategy=strategy
            ),
        )

    for tokens in sizes(most):
        some = torch.randperm(most, device="cuda")[:tokens]
        x = UnfinalizedMoEOutput(rows[some].view(-1, hidden), weights[some], index[:tokens])
        here, tail = residual[some], tails[tokens % 2]
        expected = kernels.beam_moe_finalize_norm_residual_norm(x, here, *tail, -1.5)
        for strategy in ("oneshot", "twoshot", "unfused"):
            for result in gathered(x, here, tail, strategy):
                assert_same_bits(result, expected, f"T = {tokens}, {strategy}")
    for workspace in workspaces:
        workspace.check()


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("hidden", [256, 7168])
def test_bits_of_an_allreduce_do_not_depend_on_the_batch(ranks: int, hidden: int) -> None:
    torch.manual_seed(ranks)
    top_k, most = 3, 300
    parts = [
        (
            torch.randn(most, top_k, hidden, device="cuda").bfloat16(),
            torch.rand(most, top_k, device="cuda"),
        )
        for _ in range(ranks)
    ]
    residual = torch.randn(most, hidden, device="cuda").bfloat16()
    weight = torch.randn(hidden, device="cuda").bfloat16()
    tail = (weight, 1e-5, weight, 1e-5, (0.75, 1.25))
    workspaces = workspaces_of(ranks, hidden)

    def results(some: Tensor) -> list[Any]:
        index = torch.arange(len(some) * top_k, dtype=torch.int32, device="cuda")
        given = [
            MoEOutput(
                UnfinalizedMoEOutput(
                    rows[some].view(-1, hidden), weights[some], index.view(len(some), top_k)
                )
            )
            for rows, weights in parts
        ]
        here = residual[some]
        return together(
            ranks,
            lambda rank: kernels.beam_finalize_allreduce_norm_residual_norm(
                given[rank], here, *tail, workspaces[rank]
            ),
        )

    expected = results(torch.arange(most, device="cuda"))[0]
    for tokens in sizes(most):
        some = torch.randperm(most, device="cuda")[:tokens]
        for result in results(some):
            assert_same_bits(result, [made[some] for made in expected], f"T = {tokens}")


def test_tensors_at_odd_addresses() -> None:
    for call in CALLS:
        case = case_of(call, 2, 7, 256, shared=True) if call == ALLREDUCE else None
        case = case or case_of(call, 2, 7, 256)
        calls = [case.arguments(rank, "cuda") for rank in range(2)]

        def moved(tensor: Tensor) -> Tensor:
            buffer = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")
            return buffer[1:].view(tensor.shape).copy_(tensor)

        for arguments in calls:
            for name in ("residual", "post_weight", "next_weight"):
                arguments[name] = moved(arguments[name])
            x = arguments["x"]
            inner = x if call != ALLREDUCE else x.routed
            inner.gemm2_permuted = moved(inner.gemm2_permuted)
        assert_conforms(case, calls, run_with(case, calls, workspaces_of(2, 256)))


def random_case(rng: random.Random, ranks: int, hidden: int) -> Case:
    tokens = rng.choice([0, 1, 2, rng.randint(3, 40), rng.randint(41, MAX_TOKENS)])
    return case_of(
        rng.choice(CALLS),
        ranks,
        tokens,
        hidden,
        top_k=rng.choice([1, 2, 8]),
        post=rng.choice(["none", "affine"]),
        next=rng.choice(["none", "affine"]),
        source=rng.choice(["normal", "zeros"]),
        seed=rng.randint(0, 9),
    )


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_any_sequence(ranks: int) -> None:
    """Sizes, strategies and operations one after the other, without the host waiting (RUN-5)."""
    rng = random.Random(ranks)
    workspaces = workspaces_of(ranks, 256)
    cases = [random_case(rng, ranks, 256) for _ in range(60)]
    calls = [[case.arguments(rank, "cuda") for rank in range(ranks)] for case in cases]
    torch.cuda.synchronize()
    results: list[list[Any]] = [[] for _ in cases]
    # The kernels that all calls need are loaded: the first ranks may run ahead by many calls.
    order = list(range(ranks))
    for index, case in enumerate(cases):
        rng.shuffle(order)
        by_rank = {}
        for rank in order:
            with torch.cuda.stream(streams(ranks)[rank]):
                by_rank[rank] = getattr(kernels, case.operation)(
                    **calls[index][rank], workspace=workspaces[rank]
                )
        results[index] = [by_rank[rank] for rank in range(ranks)]
    torch.cuda.synchronize()
    for case, arguments, result in zip(cases, calls, results, strict=True):
        assert_conforms(case, arguments, result)
    for workspace in workspaces:
        workspace.check()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("tokens", [3, 300])
def test_replays_with_other_values(ranks: int, tokens: int) -> None:
    """Captured once, replayed three times, the values changed in between (RUN-4)."""
    workspaces = workspaces_of(ranks, 256)
    # Not permuted, where the number of rows depends on the values.
    layouts = {call: {"layout": "route_major"} if call == ALLREDUCE else {} for call in CALLS}
    cases = [case_of(call, ranks, tokens, 256, top_k=2, **layouts[call]) for call in CALLS]
    calls = [[case.arguments(rank, "cuda") for rank in range(ranks)] for case in cases]
    graphs, results = [], []
    for rank in range(ranks):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=streams(ranks)[rank]):
            results.append(
                [
                    getattr(kernels, case.operation)(**call[rank], workspace=workspaces[rank])
                    for case, call in zip(cases, calls, strict=True)
                ]
            )
        graphs.append(graph)
    for seed in (1, 2, 3):
        for case, call in zip(cases, calls, strict=True):
            for rank in range(ranks):
                fresh = case.replace(seed=seed).arguments(rank, "cuda")
                for (_, target), (_, source) in zip(
                    tensors_in(call[rank]), tensors_in(fresh), strict=True
                ):
                    target.copy_(source)
        together(ranks, lambda rank: graphs[rank].replay())
        for index, case in enumerate(cases):
            assert_conforms(case, calls[index], [results[rank][index] for rank in range(ranks)])
    for workspace in workspaces:
        workspace.check()


def lost(ranks: int = 3) -> list[BeamAllReduceWorkspace]:
    made = BeamAllReduceWorkspace.virtual(ranks, 256, 64)
    for workspace in made:
        workspace.deadline_s = 0.2
    return made


def call_with(case: Case, rank: int, workspace: BeamAllReduceWorkspace) -> Any:
    return getattr(kernels, case.operation)(**case.arguments(rank, "cuda"), workspace=workspace)


@pytest.mark.parametrize("call", ["oneshot", "twoshot", ALLREDUCE])
@pytest.mark.parametrize("tokens", [1, 40])
def test_a_rank_that_does_not_arrive_is_named(call: str, tokens: int) -> None:
    """Also the last rank, which of one token owns nothing: nobody waits for its rows."""
    workspaces = lost()
    case = case_of(call, 3, tokens, 256)
    together(3, lambda rank: call_with(case, rank, workspaces[rank]))
    for _ in range(2):  # a lost workspace does not wait again
        together(
            3,
            lambda rank: (
                None
                if rank == 2 or workspaces[rank].buffers.report[0]
                else call_with(case, rank, workspaces[rank])
            ),
        )
    for rank in (0, 1):
        with pytest.raises(ExchangeError, match="rank 2 did not arrive") as raised:
            workspaces[rank].check()
        assert raised.value.rank == 2
        assert raised.value.call == 1
        with pytest.raises(ExchangeError, match="rank 2"):
            call_with(case, rank, workspaces[rank])
    workspaces[2].check()


@pytest.mark.parametrize(
    ("other", "shown"),
    [
        (("oneshot", 9), "oneshot gather of 9 tokens with the next norm"),
        (("twoshot", 8), "twoshot gather of 8 tokens"),
        ((ALLREDUCE, 8), "all-reduce of 8 tokens"),
    ],
)
def test_a_rank_that_makes_another_call_is_named(other: tuple[str, int], shown: str) -> None:
    workspaces = lost()
    mine, theirs = case_of("oneshot", 3, 8, 256), case_of(other[0], 3, other[1], 256)
    together(3, lambda rank: call_with(theirs if rank == 1 else mine, rank, workspaces[rank]))
    for rank in (0, 2):
        with pytest.raises(ExchangeError, match=f"rank 1 called {shown}"):
            workspaces[rank].check()
    with pytest.raises(ExchangeError, match=r"rank [02] called oneshot gather of 8 tokens"):
        workspaces[1].check()


def test_a_call_of_no_tokens_where_others_have_some() -> None:
    workspaces = lost(2)
    some, none = case_of("oneshot", 2, 8, 256), case_of("oneshot", 2, 0, 256)
    together(2, lambda rank: call_with(none if rank else some, rank, workspaces[rank]))
    with pytest.raises(ExchangeError, match="rank 1 did not arrive"):
        workspaces[0].check()


def test_what_does_not_arrive_is_nan() -> None:
    workspaces = lost(2)
    case = case_of("oneshot", 2, 8, 256)
    with torch.cuda.stream(streams(2)[0]):
        hidden, normalized = call_with(case, 0, workspaces[0])
    torch.cuda.synchronize()
    assert not bool(hidden[:4].isnan().any())
    assert bool(hidden[4:].isnan().all())
    assert bool(normalized[4:].isnan().all())


def test_virtual_refuses_what_it_cannot_serve() -> None:
    with pytest.raises(ContractError, match="found 9; allowed: 1 to 8"):
        BeamAllReduceWorkspace.virtual(9, 256, 8)


def test_another_device_or_implementation_is_refused() -> None:
    from moetail.reference import BeamAllReduceWorkspace as OfReference

    case = case_of("oneshot", 1, 2, 256)
    foreign: Any = OfReference(1, 0, 256, 8, None)  # type: ignore[arg-type]
    with pytest.raises(ContractError, match="without GPU buffers"):
        call_with(case, 0, foreign)
