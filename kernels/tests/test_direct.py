"""Eager calls past the checks and the dispatcher: which are taken, and what becomes of the others.

What needs no GPU: the conditions in C++ against the checks, and which calls go the other way.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import moetail.kernels as kernels
import moetail.reference as reference
from moetail.kernels import build, direct
from moetail.spec import ContractError, MoEOutput, UnfinalizedMoEOutput, checks, operations
from moetail.spec.operations import Operation

TOKENS, TOP_K, HIDDEN = 3, 2, 512

SOURCE = """
#include "arguments.h"

#include <tvm/ffi/function.h>

using namespace moetail;

bool finalize(MaybeTensor rows, MaybeTensor weights, MaybeTensor output, AnyView routed_scale,
              MaybeTensor post_weight, AnyView post_eps) {
  return finalize_fits(rows, weights, output, routed_scale, {post_weight, post_eps});
}

bool boundary(MaybeTensor x, MaybeTensor residual, MaybeTensor post_weight, AnyView post_eps,
              MaybeTensor next_weight, AnyView next_eps, AnyView x_scale, AnyView r_scale) {
  return boundary_fits(
      x, residual, {{post_weight, post_eps}, {next_weight, next_eps}, x_scale, r_scale});
}

bool fused(MaybeTensor rows, MaybeTensor weights, MaybeTensor map, AnyView routed_scale,
           MaybeTensor residual, MaybeTensor post_weight, AnyView post_eps, MaybeTensor next_weight,
           AnyView next_eps, AnyView x_scale, AnyView r_scale) {
  return fused_fits(rows, weights, map, residual,
                    {{post_weight, post_eps}, {next_weight, next_eps}, x_scale, r_scale},
                    routed_scale);
}

bool output(MaybeTensor rows, MaybeTensor weights, MaybeTensor map, MaybeTensor shared,
            AnyView factor, bool route_major) {
  return output_fits(rows, weights, map, shared, factor, route_major);
}

bool gather(MaybeTensor rows, MaybeTensor weights, MaybeTensor map, AnyView routed_scale,
            MaybeTensor residual, MaybeTensor post_weight, AnyView post_eps,
            MaybeTensor next_weight, AnyView next_eps, AnyView x_scale, AnyView r_scale,
            int64_t world_size, int64_t hidden_size, int64_t max_tokens) {
  return gather_fits(rows, weights, map, residual,
                     {{post_weight, post_eps}, {next_weight, next_eps}, x_scale, r_scale},
                     routed_scale, {world_size, hidden_size, max_tokens});
}

bool allreduce(MaybeTensor rows, MaybeTensor weights, MaybeTensor map, MaybeTensor shared,
               AnyView factor, bool route_major, MaybeTensor residual, MaybeTensor post_weight,
               AnyView post_eps, MaybeTensor next_weight, AnyView next_eps, AnyView x_scale,
               AnyView r_scale, int64_t world_size, int64_t hidden_size, int64_t max_tokens) {
  return allreduce_fits(rows, weights, map, shared, factor, route_major, residual,
                        {{post_weight, post_eps}, {next_weight, next_eps}, x_scale, r_scale},
                        {world_size, hidden_size, max_tokens});
}
"""


@dataclasses.dataclass
class Sizes:
    world_size: int = 2
    rank: int = 0
    hidden_size: int = HIDDEN
    max_tokens: int = 8


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


def identity() -> Tensor:
    return torch.arange(TOKENS * TOP_K, dtype=torch.int32).view(TOKENS, TOP_K)


# --- the arguments of each operation, and who decides on them -------------------------------------

TAIL = ("residual", "post_weight", "post_eps", "next_weight", "next_eps", "x_scale", "r_scale")
ROUTES = ("rows", "weights", "map")
OUTPUT = (*ROUTES, "shared", "factor", "route_major")
SIZES = ("world_size", "hidden_size", "max_tokens")
NAMES = {
    "finalize": ("slots", "weights", "output", "routed_scale", "post_weight", "post_eps"),
    "boundary": ("x", *TAIL),
    "fused": (*ROUTES, "routed_scale", *TAIL),
    "output": OUTPUT,
    "gather": (*ROUTES, "routed_scale", *TAIL, *SIZES),
    "allreduce": (*OUTPUT, *TAIL, *SIZES),
}


def valid(rng: random.Random) -> dict[str, Any]:
    """Arguments that every operation takes, by name."""
    finalized = rng.random() < 0.3
    return {
        "slots": bf16(TOKENS + 1, TOP_K, HIDDEN),
        "rows": bf16(TOKENS if finalized else TOKENS * TOP_K, HIDDEN),
        "weights": None if finalized else torch.rand(TOKENS, TOP_K),
        "map": None if finalized else identity(),
        "shared": rng.choice([None, bf16(TOKENS, HIDDEN)]),
        "output": bf16(TOKENS, HIDDEN),
        "x": bf16(TOKENS, HIDDEN),
        "residual": bf16(TOKENS, HIDDEN),
        "post_weight": bf16(HIDDEN),
        "post_eps": 1e-5,
        "next_weight": rng.choice([None, bf16(HIDDEN)]),
        "next_eps": rng.choice([None, 0.0, 1]),
        "x_scale": 0.5,
        "r_scale": rng.choice([1.0, 2]),
        "routed_scale": rng.choice([1.5, 1]),
        "factor": 2.5,
        "route_major": rng.random() < 0.5,
        "world_size": rng.choice([1, 2, 4]),
        "hidden_size": HIDDEN,
        "max_tokens": 8,
    }


def spoilt(tensor: Tensor | None, rng: random.Random) -> Tensor | None:
    """Another tensor: of another dtype, rank, layout, size or device, or none."""
    if tensor is None:
        return rng.choice([bf16(HIDDEN), bf16(TOKENS, HIDDEN), torch.rand(TOKENS, TOP_K)])
    ways: list[Callable[[Tensor], Tensor | None]] = [
        lambda t: None,
        lambda t: t.to(
            rng.choice([torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64])
        ),
        lambda t: t[None],
        lambda t: t[0],
        lambda t: t.flatten(),
        lambda t: torch.stack((t, t), -1)[..., 0],  # not contiguous
        lambda t: t.repeat_interleave(2, 0),
        lambda t: t[..., : t.shape[-1] // 2].contiguous(),
        lambda t: torch.cat((t, t), -1),
        lambda t: t[:1],
        lambda t: t[:-1],
        lambda t: t[:0],
        lambda t: t[..., :0],
        lambda t: t.to("meta"),
    ]
    return rng.choice(ways)(tensor)


NUMBERS = [None, True, "1", float("nan"), float("inf"), -1.0, -0.0, 0, 3, 2**70, Fraction(1, 3)]
NUMBERS += [numpy.float32(0.5), numpy.float64(0.5), numpy.int64(2), numpy.bool_(True), 1j, [1.0]]
NUMBERS += [torch.tensor(1.0)]


def drawn(name: str, rng: random.Random) -> dict[str, Any]:
    """Arguments of an operation, none to two of them spoilt, or one that lies in another."""
    arguments = {key: value for key, value in valid(rng).items() if key in NAMES[name]}
    for key in rng.sample(NAMES[name], rng.choice([0, 1, 1, 2])):
        if key in SIZES:
            arguments[key] = rng.choice([1, 2, 3, HIDDEN, HIDDEN // 2])
        elif key == "route_major":
            arguments[key] = not arguments[key]
        elif isinstance(arguments[key], Tensor) or key in ("weights", "map", "shared"):
            arguments[key] = spoilt(arguments[key], rng)
        elif key.endswith("weight"):
            arguments[key] = spoilt(bf16(HIDDEN), rng)
        else:
            arguments[key] = rng.choice(NUMBERS)
    if name == "finalize" and rng.random() < 0.2:
        whole = bf16(2 * TOKENS * TOP_K * HIDDEN)
        first = rng.choice([0, TOKENS, TOKENS * TOP_K]) * HIDDEN
        arguments["slots"] = whole[: TOKENS * TOP_K * HIDDEN].view(TOKENS, TOP_K, HIDDEN)
        arguments["output"] = whole[first : first + TOKENS * HIDDEN].view(TOKENS, HIDDEN)
    return arguments


def by_the_checks(name: str, given: dict[str, Any]) -> bool:
    def tail() -> dict[str, Any]:
        names = ("residual", "post_weight", "post_eps", "next_weight", "next_eps")
        scales = (given["x_scale"], given["r_scale"])
        return {**{key: given[key] for key in names}, "scales": scales}

    def output() -> MoEOutput:
        rows, weights, index = (given[key] for key in ROUTES)
        alone = weights is None and index is None
        routes = UnfinalizedMoEOutput(rows, weights, index, given["route_major"])
        return MoEOutput(rows if alone else routes, given["shared"], given["factor"])

    def routes() -> UnfinalizedMoEOutput:
        return UnfinalizedMoEOutput(*(given[key] for key in ROUTES))

    def sizes() -> Sizes:
        return Sizes(**{key: given[key] for key in SIZES})

    def finalize() -> dict[str, Any]:
        renamed = {"slots": "expert_outputs", "weights": "expert_weights"}
        return {renamed.get(key, key): given[key] for key in NAMES["finalize"]}

    def beam() -> dict[str, Any]:
        return {"x": routes(), **tail(), "routed_scale": given["routed_scale"], "strategy": None}

    calls: dict[str, tuple[Operation, Callable[[], dict[str, Any]]]] = {
        "finalize": (operations.FINALIZE, finalize),
        "boundary": (operations.BOUNDARY, lambda: {"x": given["x"], **tail()}),
        "fused": (operations.FUSED, beam),
        "output": (operations.MOE_OUTPUT, lambda: {"x": output()}),
        "gather": (operations.GATHER, lambda: {**beam(), "workspace": sizes()}),
        "allreduce": (
            operations.ALLREDUCE,
            lambda: {"x": output(), **tail(), "workspace": sizes()},
        ),
    }
    operation, call = calls[name]
    try:
        checks.check(operation, call())
    except ContractError:
        return False
    return True


@pytest.fixture(scope="module")
def conditions(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The C++ conditions, compiled without CUDA."""
    cpp = pytest.importorskip("tvm_ffi.cpp")
    if shutil.which("g++") is None and shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    return cpp.load_inline(
        "moetail_arguments",
        cpp_sources=SOURCE,
        functions=list(NAMES),
        extra_include_paths=[str(build.CSRC)],
        build_directory=str(tmp_path_factory.mktemp("arguments")),
    )


def fits(conditions: Any, name: str, given: dict[str, Any]) -> bool:
    """By the C++ conditions. A tensor without memory never is."""
    try:
        answer: bool = getattr(conditions, name)(*(given[key] for key in NAMES[name]))
    except RuntimeError:
        assert any(isinstance(v, Tensor) and v.is_meta for v in given.values())
        return False
    return answer


def is_rare(value: Any) -> bool:
    """What the checks may take, and the kernels' own code never does."""
    if isinstance(value, Tensor):
        return value.is_meta
    return isinstance(value, int) and value >= 2**63


@pytest.mark.parametrize("name", list(NAMES))
def test_takes_what_the_checks_take(conditions: Any, name: str) -> None:
    rng = random.Random(name)
    taken, refused = 0, 0
    for _ in range(1500):
        given = drawn(name, rng)
        found, expected = fits(conditions, name, given), by_the_checks(name, given)
        if any(is_rare(value) for value in given.values()):
            assert not found
            continue
        assert found == expected, "".join(
            f"{key}: {(v.dtype, v.shape, v.stride()) if isinstance(v, Tensor) else repr(v)}\n"
            for key, v in given.items()
        )
        taken, refused = taken + found, refused + (not found)
    assert min(taken, refused) > 150


# --- which calls go the other way -----------------------------------------------------------------


class Kernels:
    """Stands for a GPU's kernels, where tensors are on the CPU."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def function(*arguments: Any) -> bool:
            self.calls.append(name)
            if isinstance(self.answer, Exception):
                raise self.answer
            return bool(self.answer)

        return function


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Kernels]:
    """Makes a stand-in the kernels of CPU tensors, which are on device -1."""

    def install(answer: Any) -> Kernels:
        made = Kernels(answer)
        monkeypatch.setitem(direct.loaded, -1, made)
        return made

    return install


def arguments() -> tuple[Any, ...]:
    x = UnfinalizedMoEOutput(bf16(TOKENS * TOP_K, HIDDEN), torch.rand(TOKENS, TOP_K), identity())
    return x, bf16(TOKENS, HIDDEN), bf16(HIDDEN), 1e-6, bf16(HIDDEN), 1e-5, (0.5, 1.5)


def calls() -> dict[str, Callable[[Any], Any]]:
    """Each operation, of the reference or the kernels; results of equal calls have equal bits."""
    x, residual, *rest = arguments()
    slots = x.gemm2_permuted.view(TOKENS, TOP_K, HIDDEN)
    return {
        "try_finalize": lambda m: m.beam_moe_finalize(
            slots, x.expert_weights, torch.empty_like(residual), 1.5
        ),
        "try_boundary": lambda m: m.beam_norm_residual_norm(residual, residual, *rest),
        "try_fused": lambda m: m.beam_moe_finalize_norm_residual_norm(x, residual, *rest, 1.5),
        "try_output": lambda m: m.finalize_moe_output(MoEOutput(x, residual, 1.5)),
    }


@pytest.mark.parametrize("name", list(calls()))
@pytest.mark.parametrize("answer", [False, RuntimeError("no storage")])
def test_what_is_not_taken_goes_through_the_operators(
    on_cpu: Callable[[Any], Kernels], name: str, answer: Any
) -> None:
    call = calls()[name]
    expected = call(reference)
    stand_in = on_cpu(answer)
    found = call(kernels)
    assert stand_in.calls == [name]
    for a, b in zip(
        *((v if isinstance(v, tuple) else (v,)) for v in (expected, found)), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", list(calls()))
def test_what_is_taken_is_returned_as_it_was_made(
    on_cpu: Callable[[Any], Kernels], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, names in ((checks, dir(checks)), (kernels.operators, dir(kernels.operators))):
        for other in names:
            if other.startswith(("check", "finalize", "boundary")):
                monkeypatch.setattr(module, other, None)
    stand_in = on_cpu(True)
    made = calls()[name](kernels)
    assert stand_in.calls == [name]
    for tensor in made if isinstance(made, tuple) else (made,):
        assert tensor.shape == (TOKENS, HIDDEN)
        assert tensor.dtype == torch.bfloat16
        assert tensor.is_contiguous()


def test_refusals_keep_their_words(on_cpu: Callable[[Any], Kernels]) -> None:
    on_cpu(False)
    x, residual, *rest = arguments()
    wrong: list[tuple[str, Callable[[], Any]]] = [
        (
            "residual: found NoneType",
            lambda: kernels.beam_norm_residual_norm(residual, None, *rest),
        ),
        ("x: found list", lambda: kernels.beam_norm_residual_norm([1], residual, *rest)),
        (
            r"x: found UnfinalizedMoEOutput; allowed: a tensor",
            lambda: kernels.beam_norm_residual_norm(x, residual, *rest),
        ),
        (
            "x: found Tensor; allowed: an UnfinalizedMoEOutput",
            lambda: kernels.beam_moe_finalize_norm_residual_norm(residual, residual, *rest),
        ),
        (
            "scales: found",
            lambda: kernels.beam_norm_residual_norm(residual, residual, *rest[:-1], (1.0,)),
        ),
        (
            "strategy: found 'quick'",
            lambda: kernels.beam_moe_finalize_norm_residual_norm(
                x, residual, *rest, strategy="quick"
            ),
        ),
        ("x: found int; allowed: a MoEOutput", lambda: kernels.finalize_moe_output(3)),
    ]
    for words, call in wrong:
        with pytest.raises(ContractError, match=words):
            call()


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class SeenToo(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    pass


def test_what_something_has_to_see_goes_through_the_dispatcher(
    on_cpu: Callable[[Any], Kernels],
) -> None:
    stand_in = on_cpu(False)
    tensor = bf16(TOKENS, HIDDEN)

    def look(*others: Any, first: Any = tensor) -> Any:
        return direct._kernels_for((first, *others))

    assert look(None, tensor, Parameter(tensor, requires_grad=False)) is stand_in
    for mode in (Seen(), SeenToo()):
        with mode:
            assert look() is None
    assert look() is stand_in
    assert look(tensor.as_subclass(Subclass)) is None
    assert look(3) is None
    assert look(first=tensor.as_subclass(Subclass)) is None
    assert look(first=None) is None
    assert look(Parameter(tensor)) is None
    with torch.no_grad():
        assert look(Parameter(tensor)) is stand_in
    found = []

    def traced(x: Tensor) -> Tensor:
        found.append(direct._kernels_for((x,)))
        return x + 1

    torch.vmap(traced)(tensor)
    torch.jit.trace(traced, tensor, check_trace=False)
    torch.func.functionalize(traced)(tensor)
    assert found == [None] * len(found)
    assert len(found) >= 3

    def compiled(x: Tensor) -> Tensor:
        return x + 1 if direct._kernels_for((x,)) is None else x

    assert torch.equal(torch.compile(compiled, backend="eager", fullgraph=True)(tensor), tensor + 1)
