"""Each aimed source exposes the breaks of its rule, and as few others as arithmetic allows.

The evaluation below shares nothing with the producers: numpy in float64, its own rounding from the
bits, and one switch a break. Sums are float64 and FP32 products are rounded where the contract has
FP32; that is exact enough, since aimed values are planted on short grids.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from moetail.conformance.cases import SOURCES, Case, aimed_cases

Array = np.ndarray[Any, np.dtype[Any]]
Values = dict[str, Array]

CONVERT = "convert_flashinfer_moe_output"
ROUTE_MAJOR = "route_major_moe_output"
FINALIZE = "beam_moe_finalize"
BOUNDARY = "beam_norm_residual_norm"
FUSED = "beam_moe_finalize_norm_residual_norm"
GATHER = "beam_moe_finalize_gather_norm_residual_norm"
MOE_OUTPUT = "finalize_moe_output"
ALLREDUCE = "beam_finalize_allreduce_norm_residual_norm"
ARITHMETIC = (FINALIZE, BOUNDARY, FUSED, GATHER, MOE_OUTPUT, ALLREDUCE)

DROPPED = 45  # bits of a float64 that BF16 lacks


def rounded(values: Array, mode: str = "") -> Array:
    """To BF16's grid, from the bits; values above its subnormals only."""
    bits = np.ascontiguousarray(values, dtype=np.float64).view(np.uint64)
    half = np.uint64(1 << (DROPPED - 1))
    rest = bits & np.uint64((1 << DROPPED) - 1)
    down = bits - rest
    up = down + np.uint64(1 << DROPPED)
    odd = (down >> np.uint64(DROPPED)) & np.uint64(1) == 1
    if mode == "truncate":
        take = np.zeros(bits.shape, dtype=bool)
    elif mode == "half away":
        take = rest >= half
    elif mode == "half to zero":
        take = rest > half
    elif mode == "half up":
        take = (rest > half) | ((rest == half) & (values > 0))
    elif mode == "away":
        take = rest > 0
    else:
        take = (rest > half) | ((rest == half) & odd)
    return np.where(np.isfinite(values), np.where(take, up, down).view(np.float64), values)


def fp32(values: Array) -> Array:
    with np.errstate(over="ignore"):
        return values.astype(np.float32).astype(np.float64)


def numbers(tensor: torch.Tensor) -> Array:
    return tensor.double().numpy()


@functools.lru_cache(maxsize=2)
def everyones(case: Case) -> list[dict[str, Any]]:
    """Every rank's arguments; the evaluation changes none."""
    return [case.arguments(rank) for rank in range(case.ranks)]


@functools.lru_cache(maxsize=2)
def legal_result(case: Case) -> Values:
    return Evaluation(case).run()


@dataclass
class Evaluation:
    """The contract's arithmetic, apart from the breaks named."""

    case: Case
    breaks: frozenset[str] = frozenset()

    def rn(self, values: Array) -> Array:
        modes = ("truncate", "half away", "half to zero", "half up", "away")
        mode = next((mode for mode in modes if mode in self.breaks), "")
        return rounded(values, mode)

    def unless(self, name: str, values: Array) -> Array:
        return values if name in self.breaks else self.rn(values)

    def reduce(self, rows: Array, weights: Array, index: Array) -> Array:
        """``[T, H]`` of rows ``[rows, H]``."""
        tokens, top_k = weights.shape
        if "weights as bf16" in self.breaks:
            weights = rounded(weights)
        total = np.zeros((tokens, rows.shape[1]))
        for slot in range(top_k):
            row, weight = index[:, slot], weights[:, slot]
            live = row >= 0
            if "-1 as row 0" in self.breaks:
                row, live = np.maximum(row, 0), np.ones_like(live)
            if "-1 as last row" in self.breaks:
                row, live = np.where(row < 0, len(rows) - 1, row), np.ones_like(live)
            if "-1 as weight 0" in self.breaks:
                weight = np.where(live, weight, 0.0)
                row, live = np.maximum(row, 0), np.ones_like(live)
            if "-1 as previous route" in self.breaks and slot:
                row, live = (
                    np.where(row < 0, index[:, slot - 1], row),
                    live | (index[:, slot - 1] >= 0),
                )
            with np.errstate(invalid="ignore", over="ignore"):
                term = weight[:, None] * rows[np.maximum(row, 0)]
                if "bf16 products" in self.breaks:
                    term = rounded(term)
                if "fp16 accumulator" in self.breaks:
                    added = (total + term).astype(np.float16).astype(np.float64)
                else:
                    added = total + term
                if "bf16 accumulator" in self.breaks:
                    added = rounded(added)
            total = np.where(live[:, None], added, total)
        if "no round before scale" in self.breaks:
            return total
        return self.rn(total)

    def scale(self, reduced: Array) -> Array:
        factor = float(np.float32(self.case.routed_scale))
        if "scale never" in self.breaks:
            return reduced
        if self.case.routed_scale == 1.0:
            return self.rn(reduced)
        product = reduced * factor  # exact: 8 and 24 bits
        if "products exact" not in self.breaks:
            product = fp32(product)
        out = self.unless("no round after scale", product)
        if "scale twice" in self.breaks:
            out = self.rn(fp32(out * factor))
        return out

    def norm(self, values: Array, weight: Any, eps: float, seen: Array | None = None) -> Array:
        """``seen``: what the norm would see if the input's rounding were missing."""
        source = values if seen is None else seen
        hidden = values.shape[1]
        counts = {
            "mean over H - 1": hidden - 1,
            "mean over H + 1": hidden + 1,
            "mean over padded H": hidden + 64,
            "mean over top_k": self.case.top_k,
        }
        count = next((n for name, n in counts.items() if name in self.breaks), hidden)
        squares = source**2
        if "bf16 mean" in self.breaks:
            total = np.zeros((len(values), 1))
            for column in range(hidden):
                total = rounded(total + rounded(squares[:, column : column + 1]))
        elif "fp16 squares" in self.breaks:
            with np.errstate(over="ignore"):
                total = squares.astype(np.float16).astype(np.float64).sum(1, keepdims=True)
        else:
            total = squares.sum(1, keepdims=True)
        mean = total / count
        if "eps missing" in self.breaks:
            inverse = 1 / np.sqrt(mean)
        elif "eps outside" in self.breaks:
            inverse = 1 / (np.sqrt(mean) + eps)
        elif "eps after" in self.breaks:
            inverse = 1 / np.sqrt(mean) + eps
        else:
            inverse = 1 / np.sqrt(mean + eps)
        normed = source * inverse
        if weight is None:
            return self.rn(normed)
        if "affine after round" in self.breaks:
            normed = self.rn(normed)
        return self.rn(normed * numbers(weight))

    def finalize_output(self, x: Any) -> Array:
        """This rank's p."""
        if isinstance(x.routed, torch.Tensor):
            reduced = numbers(x.routed)
        else:
            reduced = self.reduce(
                numbers(x.routed.gemm2_permuted),
                numbers(x.routed.expert_weights),
                x.routed.expanded_idx_to_permuted_idx.numpy(),
            )
        if x.shared_output is None:
            return reduced if "part kept" in self.breaks else self.scale(reduced)
        shared = numbers(x.shared_output)
        factor = float(np.float32(self.case.routed_scale))
        if "shared before scale" in self.breaks:
            return self.scale(self.rn(reduced + shared))
        if "shared scaled" in self.breaks:
            shared = self.rn(shared * factor)
        if "shared on unrounded" in self.breaks:
            return self.rn(fp32(reduced * factor) + shared)
        return self.rn(self.scale(reduced) + shared)

    def boundary(self, s: Array, seen: Array | None, arguments: dict[str, Any]) -> Values:
        """``seen``: s before its rounding, where a break keeps it."""
        n = s if seen is None else seen
        if arguments["post_eps"] is not None:
            n = self.norm(s, arguments["post_weight"], arguments["post_eps"], seen)
        residual = numbers(arguments["residual"])
        if arguments["scales"] is not None:
            x_scale, r_scale = (float(np.float32(scale)) for scale in arguments["scales"])
            fused = "residual fused" in self.breaks
            a, b = fp32(n * x_scale), fp32(residual * r_scale)
            if "products exact" in self.breaks:
                a, b = n * x_scale, residual * r_scale
            n = a if fused or "x product kept" in self.breaks else self.rn(a)
            residual = b if fused or "residual product kept" in self.breaks else self.rn(b)
        total = n + residual
        hidden = self.rn(fp32(total))
        out = {"hidden": hidden}
        if arguments["next_eps"] is not None:
            unrounded = total if "norm of unrounded hidden" in self.breaks else None
            out["normalized"] = self.norm(
                hidden, arguments["next_weight"], arguments["next_eps"], unrounded
            )
        return out

    def run(self) -> Values:
        case = self.case
        everything = everyones(case)
        first = everything[0]
        if case.operation == BOUNDARY:
            return self.boundary(numbers(first["x"]), None, first)
        if case.operation == MOE_OUTPUT:
            return {"output": self.finalize_output(first["x"])}
        if case.operation == ALLREDUCE:
            with np.errstate(invalid="ignore"):
                total = sum(self.finalize_output(arguments["x"]) for arguments in everything)
            assert isinstance(total, np.ndarray)
            kept = total if "sum over ranks kept" in self.breaks else None
            return self.boundary(self.rn(total), kept, first)
        if case.operation == FINALIZE:
            live, top_k = first["output"].shape[0], case.top_k
            rows = numbers(first["expert_outputs"][:live]).reshape(live * top_k, -1)
            weights = numbers(first["expert_weights"][:live])
            reduced = self.reduce(rows, weights, np.arange(live * top_k).reshape(live, top_k))
            s, seen = self._scaled(reduced)
            if first["post_eps"] is not None:
                return {"output": self.norm(s, first["post_weight"], first["post_eps"], seen)}
            return {"output": self.rn(s)}
        parts = []
        slots = -(-case.tokens // case.ranks)
        for rank, arguments in enumerate(everything):
            x = arguments["x"]
            owned = max(0, min(slots, case.tokens - rank * slots))
            parts.append(
                self.reduce(
                    numbers(x.gemm2_permuted),
                    numbers(x.expert_weights[:owned]),
                    x.expanded_idx_to_permuted_idx[:owned].numpy(),
                )
            )
        s, seen = self._scaled(np.concatenate(parts))
        return self.boundary(s, seen, first)

    def _scaled(self, reduced: Array) -> tuple[Array, Array | None]:
        """(s, what the next stage sees instead where a rounding is missing)."""
        if "no round before scale" in self.breaks:
            kept = fp32(reduced * float(np.float32(self.case.routed_scale)))
            return self.rn(kept), kept
        s = self.scale(reduced)
        return (self.rn(s), s) if "no round after scale" in self.breaks else (s, None)


def share(case: Case, *breaks: str) -> float:
    """The share of elements of the outputs that the breaks change."""
    legal = legal_result(case)
    broken = Evaluation(case, frozenset(breaks)).run()
    shares = []
    for name, values in legal.items():
        if name == "normalized" and case.source not in ("hidden",) and case.post != "none":
            continue  # aimed at the post-norm; what follows it is no matter
        other = broken[name]
        same = (values == other) | (np.isnan(values) & np.isnan(other))
        shares.append(float(1 - same.mean()))
    return max(shares)


ROUNDINGS = ("truncate", "half away", "half to zero", "half up")
ROUTE_BREAKS = ("-1 as row 0", "-1 as last row", "-1 as previous route", "-1 as weight 0")
ACCUMULATORS = ("bf16 accumulator", "bf16 products", "fp16 accumulator")
SCALES = ("no round before scale", "scale twice", "scale never")
EPS = ("eps missing", "eps outside", "eps after")
COUNTS = ("mean over H - 1", "mean over padded H", "mean over top_k")
PRODUCTS = ("residual fused", "x product kept", "residual product kept")

# source: (breaks that must show on half of the elements, breaks that must not show at all)
AIMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "ties-down": (
        ("half away", "away"),
        (*ACCUMULATORS, "truncate", "half to zero", "weights as bf16"),
    ),
    "ties-up": (("truncate", "half to zero"), (*ACCUMULATORS, "half away", "weights as bf16")),
    "ties-near": ((), (*ACCUMULATORS[:2], "half away", "half up", "weights as bf16")),
    "accumulate": (
        ACCUMULATORS,
        (*ROUNDINGS, "weights as bf16", "scale twice", "affine after round"),
    ),
    "weights": (("weights as bf16",), (*ROUNDINGS, "scale twice")),
    "scale": (SCALES, ("half away", "half to zero", "bf16 accumulator", "weights as bf16")),
    "scale-round": (("no round after scale",), (*ACCUMULATORS[:2], "weights as bf16")),
    "scale-double": (("products exact", "scale twice"), (*ACCUMULATORS, "weights as bf16")),
    "residual-double": (("products exact",), (*ACCUMULATORS, "weights as bf16")),
    "norm-affine": (("affine after round",), (*ACCUMULATORS, *EPS[1:], "weights as bf16")),
    "norm-eps": (EPS[:2], (*ACCUMULATORS[:2], "weights as bf16", "affine after round")),
    "norm-mean": (COUNTS, (*ACCUMULATORS[:2], "weights as bf16", "affine after round")),
    "norm-outlier": (
        ("bf16 mean", "fp16 squares"),
        (*ACCUMULATORS[:2], "weights as bf16", "affine after round"),
    ),
    "norm-prenorm": (("no round before scale",), ("bf16 accumulator", "affine after round")),
    "residual": ((), (*ACCUMULATORS, "half away", "half to zero")),
    "hidden": (("norm of unrounded hidden",), (*ACCUMULATORS, "affine after round")),
    "shared": (("shared on unrounded",), (*ACCUMULATORS[:2], "weights as bf16")),
    "allreduce": (("sum over ranks kept",), (*ACCUMULATORS, "weights as bf16")),
    "routes": (ROUTE_BREAKS[:2], ("weights as bf16",)),
}


def _cases(source: str) -> list[Case]:
    cases = []
    for operation in ARITHMETIC:
        ranks = (1, 2, 3) if operation == ALLREDUCE else (1, 2) if operation == GATHER else (1,)
        for count in ranks:
            cases += aimed_cases(operation, source=source, ranks=count, seed=1)
    return cases


def _parameters() -> list[Any]:
    return [pytest.param(source, case, id=case.id) for source in AIMS for case in _cases(source)]


def test_every_aimed_source_is_tested() -> None:
    aimed = {name for name, source in SOURCES.items() if source.rule is not None}
    assert aimed == {*AIMS, "ties"}


@pytest.mark.parametrize(("source", "case"), _parameters())
def test_aimed_breaks_show_and_others_do_not(
    source: str, case: Case, record_property: Callable[[str, object], None]
) -> None:
    shown, hidden = AIMS[source]
    for name in shown:
        if not _observable(case, name):
            continue
        found = share(case, *_together(case, name))
        record_property(f"share of elements, {name}", found)
        assert found >= 0.5, f"{name} shows on {found:.0%} of the elements only"
    for name in hidden:
        assert share(case, name) == 0.0, f"{name} shows too"


def _observable(case: Case, name: str) -> bool:
    """Whether the case can show the break at all."""
    if name == "weights as bf16":
        return case.weights != "bf16"
    if name == "mean over top_k":
        return case.operation != BOUNDARY
    return True


def _together(case: Case, name: str) -> tuple[str, ...]:
    """With a scale of 1, a missing rounding before the shared add is that of the sum itself."""
    if name == "shared on unrounded" and case.routed_scale == 1.0:
        return name, "no round before scale"
    # A rank's part is rounded once more before it is sent, and so is the sum of the parts.
    if name == "no round before scale" and case.operation == ALLREDUCE and case.post != "none":
        return name, "part kept", "sum over ranks kept"
    return (name,)


@pytest.mark.parametrize("case", _cases("residual"), ids=str)
def test_every_missing_residual_rounding_shows(case: Case) -> None:
    assert case.scales is not None
    odd = [scale not in (0.5, 1.0, 2.0) for scale in case.scales]
    for name, matters in zip(PRODUCTS, (True, *odd), strict=True):
        assert share(case, name) >= 0.5 * matters, name


@pytest.mark.parametrize("case", _cases("shared"), ids=str)
def test_the_shared_part_is_neither_scaled_nor_added_early(case: Case) -> None:
    for name in ("shared before scale", "shared scaled"):
        assert share(case, name) >= (0.5 if case.routed_scale != 1.0 else 0.0), name


@pytest.mark.parametrize("case", _cases("ties"), ids=str)
def test_ties_mix_both_directions(case: Case) -> None:
    assert share(case, "truncate") >= 0.4
    assert share(case, "half away") >= 0.4
    assert share(case, "half up") >= 0.4


@pytest.mark.parametrize("case", _cases("ties-near"), ids=str)
def test_near_ties_are_on_both_sides(case: Case) -> None:
    assert 0.4 <= share(case, "truncate") <= 0.6
    assert 0.4 <= share(case, "away") <= 0.6


@pytest.mark.parametrize("case", _cases("weights"), ids=str)
def test_weights_read_as_another_dtype_show(case: Case) -> None:
    everything = case.arguments()
    weights = (
        everything["expert_weights"]
        if case.operation == FINALIZE
        else (everything["x"] if case.operation in (FUSED, GATHER) else everything["x"].routed)
    )
    tensor = weights if isinstance(weights, torch.Tensor) else weights.expert_weights
    other = torch.bfloat16 if tensor.dtype != torch.bfloat16 else torch.float16
    read = tensor.view(other).double()
    assert not torch.equal(read.flatten()[: tensor.numel()], tensor.double().flatten())


@pytest.mark.parametrize("hidden", [1024, 8192])
@pytest.mark.parametrize("source", ["norm-mean", "norm-affine", "hidden", "norm-prenorm"])
def test_norm_sources_hold_at_real_sizes(source: str, hidden: int) -> None:
    for case in aimed_cases(FUSED, source=source, tokens=2, hidden=hidden):
        (name, *_), _ = AIMS[source]
        assert share(case, name) >= 0.5


@pytest.mark.parametrize("top_k", [1, 2, 3, 8, 32])
@pytest.mark.parametrize("source", ["ties-up", "ties-down", "accumulate", "weights", "scale"])
def test_reduction_sources_hold_for_every_top_k(source: str, top_k: int) -> None:
    for case in aimed_cases(FINALIZE, source=source, tokens=3, top_k=top_k):
        shown, _ = AIMS[source]
        if top_k == 1 and source == "accumulate":
            shown = ("fp16 accumulator",)  # nothing else can go wrong with a single product
        for name in shown:
            assert share(case, name) >= 0.5, (case.id, name)


@pytest.mark.parametrize("scale", [2.827, 1 / 3, -2.5, 1.7, 3.0, 1e-3, 100.0])
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_the_scale_source_holds_for_every_scale(scale: float, top_k: int) -> None:
    case = Case(FINALIZE, "scale", 0, 3, top_k, 256, routed_scale=scale)
    for name in SCALES:
        assert share(case, name) >= 0.5, name
    shared = Case(MOE_OUTPUT, "shared", 0, 3, top_k, 256, routed_scale=scale, shared=True)
    assert share(shared, "shared on unrounded") >= 0.5


def test_a_scale_that_shows_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="further from 1"):
        Case(FINALIZE, "scale", routed_scale=1.0001)


@pytest.mark.parametrize("ranks", [5, 8])
@pytest.mark.parametrize("top_k", [2, 8])
def test_sources_hold_for_many_ranks(ranks: int, top_k: int) -> None:
    for source in ("ties-up", "accumulate", "scale", "norm-affine", "shared", "allreduce"):
        for case in aimed_cases(ALLREDUCE, source=source, ranks=ranks, tokens=9, top_k=top_k):
            for name in AIMS[source][0]:
                assert share(case, *_together(case, name)) >= 0.5, (case.id, name)


def test_route_breaks_show_in_every_layout() -> None:
    for operation in (MOE_OUTPUT, ALLREDUCE):
        for case in aimed_cases(operation, source="routes", tokens=9):
            for name in ROUTE_BREAKS[:3]:
                assert share(case, name) >= 0.5, (case.id, name)
            assert share(case, "-1 as weight 0") > 0.0


def shares() -> dict[str, dict[str, tuple[float, float]]]:
    """Of each source and each break, the least and the largest share over all cases."""
    names = [name for aim in AIMS.values() for name in aim[0]]
    names += [*PRODUCTS, *ROUNDINGS, *ROUTE_BREAKS, "shared before scale", "shared scaled"]
    table: dict[str, dict[str, tuple[float, float]]] = {}
    for source in ("ties", *AIMS):
        row: dict[str, tuple[float, float]] = {}
        for case in _cases(source):
            for name in dict.fromkeys(names):
                found = share(case, name)
                low, high = row.get(name, (1.0, 0.0))
                row[name] = min(low, found), max(high, found)
        table[source] = {name: found for name, found in row.items() if found[1] > 0.0}
    return table


if __name__ == "__main__":
    for source, row in shares().items():
        print(source, *(f"{name} {low:.2f}..{high:.2f}" for name, (low, high) in row.items()))
