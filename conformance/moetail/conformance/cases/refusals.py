"""Arguments that must be refused, made from what an operation says of its arguments.

A refusal is named in the id of its trial, so names never change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moetail.conformance.cases.case import Arguments, Case
from moetail.conformance.cases.rewrites import Change
from moetail.spec import OPERATIONS, Argument, Operation, operation, tokens_per_rank
from moetail.spec.checks import MAX_HIDDEN, MAX_TOP_K, MIN_HIDDEN

__all__ = ["Refusal", "refusals"]


@dataclass(frozen=True)
class Refusal:
    """Arguments that the contract refuses.

    Attributes:
        name: its name in ids.
        rule: the rule that refuses.
        change: makes legal arguments illegal.
        needs: restricts the cases it applies to.
    """

    name: str
    rule: str
    change: Change
    needs: Callable[[Case], bool] = lambda case: True


@functools.cache
def refusals(name: str) -> tuple[Refusal, ...]:
    """Everything that an operation that computes must refuse, argument by argument."""
    target = operation(name)
    made = {item.name: item for item in _refusals(target)} if target.computes else {}
    return tuple(made[item] for item in _known(target) if item in made)


def _refusals(target: Operation) -> Iterator[Refusal]:
    for item in target.arguments:
        if item.kind == "tensor":
            yield from _tensor(target, item)
        if item.needs:
            needed = target.argument(item.needs)
            yield Refusal(
                f"{_word(target, item)}-without-eps", "DOMAIN-1", _put(needed, None), _given(item)
            )
        if item.kind == "choice":
            others = (choice for other in OPERATIONS for choice in other.strategies)
            unknown = next(choice for choice in others if choice not in item.choices)
            yield Refusal(f"{item.role}-unknown", "DOMAIN-1", _put(item, unknown))
    if target.takes("workspace"):
        yield Refusal("other-hidden-size", "DOMAIN-1", _hidden(256, more=True), _has_tokens)
        # The call's workspace is made for fewer tokens.
        yield Refusal("past-max-tokens", "DOMAIN-1", lambda case, rank, call: call, _has_tokens)
    if target.bounded:
        yield from (
            Refusal("hidden-128", "DOMAIN-1", _hidden(MIN_HIDDEN // 2), _has_tokens),
            Refusal("hidden-not-a-multiple", "DOMAIN-1", _hidden(128, more=True), _has_tokens),
            Refusal("hidden-2880", "DOMAIN-1", _hidden(2880), _few),  # as gpt-oss has
            Refusal("hidden-8448", "DOMAIN-1", _hidden(MAX_HIDDEN + 256), _few),
            Refusal("top-k-33", "DOMAIN-1", _top_k(MAX_TOP_K + 1), _few),
        )
    if target.capacity:
        name = "too-few-slots" if target.owns else "live-past-capacity"
        change = _more_live if target.takes("output") else _fewer_slots
        yield Refusal(name, "DOMAIN-1", change, _has_tokens)


def _word(target: Operation, item: Argument) -> str:
    """The argument in a refusal's name."""
    plain = item.role == "rows" and not target.has_routes
    return item.name if plain else item.role.removesuffix("_output").replace("_", "-")


# --- the cases ------------------------------------------------------------------------------------


def _has_tokens(case: Case) -> bool:
    return case.tokens > 1


def _few(case: Case) -> bool:
    return 1 < case.tokens * case.top_k <= 64


def _given(item: Argument) -> Callable[[Case], bool]:
    """Cases in which the argument is not None, nor so short that it is contiguous anyhow."""
    return lambda case: case.gives(item.role) and (item.shape[0] == "H" or case.tokens > 1)


# --- one tensor -----------------------------------------------------------------------------------


def _tensor(target: Operation, item: Argument) -> Iterator[Refusal]:
    word, dims = _word(target, item), len(item.shape)

    def refusal(end: str, change: Callable[[Tensor], Tensor], rule: str = "DOMAIN-1") -> Refusal:
        return Refusal(f"{word}-{end}", rule, _on(item, change), _given(item))

    if dims > 1:
        yield refusal("strided", _strided, item.layout)
        yield refusal("transposed", _transposed, item.layout)
    yield refusal("of-other-rank", _folded if dims > 2 else _unfolded, item.layout)
    for end, dtype in _other_dtypes(item):
        yield refusal(end, functools.partial(torch.Tensor.to, dtype=dtype))
    yield refusal("elsewhere", _meta)
    yield refusal("too-wide" if dims > 1 else "too-long", _wider)
    if item.shape[0] == "T":
        yield refusal("too-long", _longer)
    if item.shape[0] in ("T", "slots"):
        yield Refusal(f"{word}-too-few", "DOMAIN-1", _cut(item), _given(item))


def _other_dtypes(item: Argument) -> list[tuple[str, torch.dtype]]:
    if item.role == "weights":
        others = (torch.bfloat16, torch.float64)
        return [("dtype", next(dtype for dtype in others if dtype not in item.dtypes))]
    if torch.int32 in item.dtypes:
        return [("int64", torch.int64)]
    return [("fp16", torch.float16), ("fp32", torch.float32)]


def _on(item: Argument, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda case, rank, call: item.put(call, change(item.of(call)))


def _put(item: Argument, value: object) -> Change:
    return lambda case, rank, call: item.put(call, value)


def _strided(tensor: Tensor) -> Tensor:
    """The same values in a buffer whose rows are twice as far apart."""
    return torch.cat([tensor, tensor], dim=-1)[..., : tensor.shape[-1]]


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def _folded(tensor: Tensor) -> Tensor:
    return tensor.flatten(0, 1)


def _unfolded(tensor: Tensor) -> Tensor:
    return tensor.unsqueeze(1)


def _wider(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor[..., -1:]], dim=-1)


def _longer(tensor: Tensor, count: int = 1) -> Tensor:
    return torch.cat([tensor, tensor[:1].expand(count, *tensor.shape[1:])])


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta")


def _cut(item: Argument) -> Change:
    """One token fewer than the call has."""
    return lambda case, rank, call: item.put(
        call, item.of(call)[: tokens_per_rank(case.tokens, case.ranks) - 1].contiguous()
    )


# --- all tensors of a call ------------------------------------------------------------------------


def _resized(tensor: Tensor, dim: int, size: int) -> Tensor:
    """A dimension cut, or its values repeated, to a size."""
    copies = -(-size // tensor.shape[dim])
    return torch.cat([tensor] * copies, dim=dim).narrow(dim, 0, size).contiguous()


def _hidden(size: int, *, more: bool = False) -> Change:
    """The same call at another H, or at one that is larger by so much."""

    def change(case: Case, rank: int, call: Arguments) -> Arguments:
        wanted = case.hidden + size if more else size
        for item, tensor in case.target.tensors(call):
            if item.shape[-1] == "H":
                call = item.put(call, _resized(tensor, -1, wanted))
        return call

    return change


def _top_k(size: int) -> Change:
    """The same call at another K."""

    def change(case: Case, rank: int, call: Arguments) -> Arguments:
        for item, tensor in case.target.tensors(call):
            if item.role == "map":
                index = torch.arange(len(tensor) * size, dtype=tensor.dtype, device=tensor.device)
                call = item.put(call, index.view(-1, size))
            elif "K" in item.shape:
                call = item.put(call, _resized(tensor, item.shape.index("K"), size))
            elif "slots * K" in item.shape:
                routes = tensor.view(-1, case.top_k, case.hidden)
                call = item.put(call, _resized(routes, 1, size).flatten(0, 1))
        return call

    return change


def _more_live(case: Case, rank: int, call: Arguments) -> Arguments:
    """One live token more than there are slots of rows."""
    for item in map(case.target.argument, ("output", "weights")):
        call = item.put(call, _longer(item.of(call), case.capacity + 1))
    return call


def _fewer_slots(case: Case, rank: int, call: Arguments) -> Arguments:
    """One token slot fewer than the call needs, on every rank."""
    slots = tokens_per_rank(case.tokens, case.ranks) - 1
    sizes = {"slots": slots, "slots * K": slots * case.top_k}
    for item, tensor in case.target.tensors(call):
        if item.shape[0] in sizes:
            call = item.put(call, tensor[: sizes[item.shape[0]]].contiguous())
    return call


def _known(target: Operation) -> list[str]:
    """Those that are tried, in this order: all others follow in a change of their own."""
    rows = ["rows-strided", "rows-transposed", "rows-of-other-rank", "rows-fp16", "rows-fp32"]
    hidden = ["hidden-128", "hidden-not-a-multiple", "hidden-2880", "hidden-8448"]
    weights = ["weights-dtype", "weights-too-wide", "weights-strided", "weights-elsewhere"]
    residual = ["residual-fp32", "residual-too-wide", "residual-strided"]
    post = ["post-weight-without-eps", "post-weight-fp32", "post-weight-too-long"]
    workspace = ["other-hidden-size", "past-max-tokens"]
    return {
        "finalize": [
            *rows,
            *hidden,
            "top-k-33",
            "live-past-capacity",
            *weights,
            "weights-too-few",
            "output-fp32",
            "output-too-wide",
            "output-strided",
            *post,
        ],
        "boundary": ["x-fp32", "x-fp16", *residual[:2], "residual-too-long", *post],
        "fused": [
            *rows,
            *hidden,
            "top-k-33",
            "live-past-capacity",
            *weights,
            "map-int64",
            *residual,
            *post,
            "strategy-unknown",
        ],
        "gather": [
            *rows,
            *hidden[:2],
            "top-k-33",
            "too-few-slots",
            *weights,
            "map-int64",
            *residual,
            *post,
            "strategy-unknown",
            *workspace,
        ],
        "moe output": [*rows, *weights, "map-int64", "shared-too-wide", "shared-fp32"],
        "all-reduce": [*rows, *weights, *residual, *post, *workspace],
    }.get(target.short, [])
