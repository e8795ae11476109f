"""Mutants that are another contract: ROUND-1 to ROUND-7, ROUTE-3, and OWN-4's strategies.

Each is a function from a contract to the one that the implementation follows instead. ``when`` says
for which calls it does; the others follow the contract as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from moetail.conformance.catalogue.change import breaks
from moetail.reference import Reference
from moetail.spec.contract import BF16, Contract, Rounding, Step
from moetail.spec.rules import ALLREDUCE, BOUNDARY, FINALIZE, FUSED, GATHER

Values = Mapping[str, Any]

_BEAM = (FINALIZE, FUSED, GATHER)
_TWO_NORMS = (BOUNDARY, FUSED, GATHER)

# --- when an edit holds ---------------------------------------------------------------------------


def _routed(values: Values) -> bool:
    return values["weights"] is not None


def _unscaled(values: Values) -> bool:
    return bool(values["routed_scale"] == 1.0)


def _post_normed(values: Values) -> bool:
    return values["post_eps"] is not None


def _shared(values: Values) -> bool:
    return values["shared_output"] is not None


def _unfused(values: Values) -> bool:
    return bool(values["strategy"] == "unfused")


# --- ROUND-1: FP32 products, FP32 accumulator -----------------------------------------------------


@breaks("ROUND-1")
def bf16_accumulator(contract: Contract) -> Contract:
    """Rounds the running sum to BF16 after every route."""
    return contract.edit("reduce", accumulator="bf16")


@breaks("ROUND-1")
def bf16_products(contract: Contract) -> Contract:
    """Rounds each weighted row to BF16, then sums in FP32."""
    return contract.edit("reduce", product="bf16")


@breaks("ROUND-1", source="flashinfer trtllm finalize kernel")
def bf16_every_step(contract: Contract) -> Contract:
    """Rounds products and the running sum to BF16 at every step."""
    return contract.edit("reduce", product="bf16", accumulator="bf16")


@breaks("ROUND-1")
def fp16_accumulator(contract: Contract) -> Contract:
    """Keeps the running sum in FP16 between the routes."""
    return contract.edit("reduce", accumulator="fp16")


@breaks("ROUND-1", operations=_BEAM)
def tf32_products(contract: Contract) -> Contract:
    """Multiplies in TF32, as a tensor core does: weights cut to ten bits of mantissa."""
    return contract.edit("reduce", weights="tf32")


@breaks("ROUND-1", operations=_BEAM)
def routing_weights_in_bf16(contract: Contract) -> Contract:
    """Narrows the FP32 routing weights of the Beam operations to BF16 before the products."""
    return contract.edit("reduce", weights="bf16")


@breaks("ROUND-1")
def bf16_spill_after_eight_routes(contract: Contract) -> Contract:
    """Stores the sum of every eight routes in BF16 before it goes on: fine up to top_k = 8."""
    return contract.edit("reduce", accumulator="bf16", every=8)


# --- ROUND-2: round, scale, round -----------------------------------------------------------------


@breaks("ROUND-2")
def scale_before_rounding(contract: Contract) -> Contract:
    """Multiplies the FP32 sum by the scale, so that only the product is rounded."""
    return contract.edit("round", rounds=None)


@breaks("ROUND-2", when=_routed)
def scale_folded_into_weights(contract: Contract) -> Contract:
    """Multiplies the routing weights by the scale, and rounds once."""
    scaled = Step("scaled_weights", "multiply", ("weights", "routed_scale"), stage="scale")
    return contract.insert("weights", scaled).without("scale")


@breaks("ROUND-2", source="vllm #24119")
def scale_twice(contract: Contract) -> Contract:
    """Applies the routed scale twice."""
    again = Step("scale_again", "multiply", ("scale", "routed_scale"), BF16, stage="scale")
    return contract.insert("scale", again)


@breaks("ROUND-2", source="vllm #45037, sglang #8511")
def scale_forgotten(contract: Contract) -> Contract:
    """Never applies the routed scale."""
    return contract.without("scale")


@breaks("ROUND-2")
def scale_in_bf16(contract: Contract) -> Contract:
    """Rounds the routed scale itself to BF16."""
    return contract.edit("scale", factor="bf16")


@breaks("ROUND-2", operations=(FINALIZE, FUSED), also=("ROUND-4",))
def scaled_sum_not_rounded(contract: Contract) -> Contract:
    """Hands the scaled sum in FP32 to the norm or the residual add: the second rounding is lost."""
    return contract.edit("scale", rounds=None)


@breaks("ROUND-2", operations=_BEAM, when=_post_normed)
def scale_skipped_before_norm(contract: Contract) -> Contract:
    """Leaves the scale out where a post-norm follows, since a norm cancels it: eps tells them
    apart, and so does the second rounding."""
    return contract.without("scale")


@breaks("ROUND-2", operations=(FUSED,), when=_unfused)
def unfused_forgets_scale(contract: Contract) -> Contract:
    """The "unfused" path of the one-rank operation does not pass the routed scale on."""
    return contract.without("scale")


# --- ROUND-3: to nearest, ties to even ------------------------------------------------------------


@breaks("ROUND-3")
def truncates(contract: Contract) -> Contract:
    """Cuts the low 16 bits off: rounds towards zero."""
    return contract.each_rounding(mode="toward-zero")


@breaks("ROUND-3")
def rounds_half_away(contract: Contract) -> Contract:
    """Adds half and cuts: ties go away from zero."""
    return contract.each_rounding(mode="half-away")


@breaks("ROUND-3")
def rounds_half_down(contract: Contract) -> Contract:
    """Adds just less than half and cuts: ties go towards zero."""
    return contract.each_rounding(mode="half-down")


@breaks("ROUND-3")
def rounds_half_up(contract: Contract) -> Contract:
    """Ties go up, towards positive infinity."""
    return contract.each_rounding(mode="half-up")


@breaks("ROUND-3")
def rounds_up(contract: Contract) -> Contract:
    """Rounds every value towards positive infinity."""
    return contract.each_rounding(mode="up")


@breaks("ROUND-3")
def rounds_to_odd(contract: Contract) -> Contract:
    """Sets the last bit of every inexact result."""
    return contract.each_rounding(mode="odd")


@breaks("ROUND-3")
def rounds_stochastically(contract: Contract) -> Contract:
    """Adds dither before it cuts; the dither is a hash of the value, so that runs repeat."""
    return contract.each_rounding(mode="dither")


@breaks("ROUND-3")
def rounds_through_fp16(contract: Contract) -> Contract:
    """Converts to FP16 on the way to BF16: two roundings, and FP16's range."""
    return contract.each_rounding(through="fp16")


@breaks("ROUND-3")
def rounds_through_tf32(contract: Contract) -> Contract:
    """Rounds to TF32 on the way to BF16: a value just beside a tie becomes the tie."""
    return contract.each_rounding(through="tf32")


@breaks("ROUND-3", operations=_TWO_NORMS)
def truncates_normalized(contract: Contract) -> Contract:
    """Cuts the next norm's result off instead of rounding it."""
    return contract.edit("normalized", rounds=Rounding(mode="toward-zero"))


@breaks("ROUND-3", operations=_TWO_NORMS)
def hidden_rounds_half_away(contract: Contract) -> Contract:
    """The residual add alone rounds ties away from zero."""
    return contract.edit("hidden", rounds=Rounding(mode="half-away"))


# --- ROUND-4: the norms ---------------------------------------------------------------------------


@breaks("ROUND-4")
def norm_weights_through_fp16(contract: Contract) -> Contract:
    """Keeps the norms' weights in FP16, which holds fewer exponents than BF16."""
    return contract.each("affine", weight="fp16")


@breaks("ROUND-4")
def eps_outside_root(contract: Contract) -> Contract:
    """Adds eps to the root instead of under it."""
    return contract.each("inverse_rms", eps="outside")


@breaks("ROUND-4")
def eps_missing(contract: Contract) -> Contract:
    """Leaves eps out."""
    return contract.each("inverse_rms", eps="missing")


@breaks("ROUND-4")
def eps_added_to_sum(contract: Contract) -> Contract:
    """Adds eps to the sum of squares, before it is divided by H."""
    return contract.each("inverse_rms", eps="sum")


@breaks("ROUND-4")
def eps_squared(contract: Contract) -> Contract:
    """Adds the square of eps under the root."""
    return contract.each("inverse_rms", eps="squared")


def _two_eps(values: Values) -> bool:
    return values["post_eps"] is not None and values["next_eps"] is not None


@breaks("ROUND-4", operations=_TWO_NORMS, when=_two_eps)
def eps_of_the_other_norm(contract: Contract) -> Contract:
    """Takes the next norm's eps for the post-norm, where both are on."""
    return contract.take("post_inverse", post_eps="next_eps")


@breaks("ROUND-4")
def inverse_too_large(contract: Contract) -> Contract:
    """An approximate reciprocal root, too large by 2^-12."""
    return contract.each("inverse_rms", error=2.0**-12)


@breaks("ROUND-4")
def inverse_too_small(contract: Contract) -> Contract:
    """An approximate reciprocal root, too small by 2^-13."""
    return contract.each("inverse_rms", error=-(2.0**-13))


@breaks("ROUND-4")
def inverse_in_bf16(contract: Contract) -> Contract:
    """Rounds the inverse RMS to BF16."""
    return contract.each("inverse_rms", rounds=BF16)


@breaks("ROUND-4")
def squares_truncated_to_bf16(contract: Contract) -> Contract:
    """Cuts the squares to BF16 before it sums them."""
    return contract.each("inverse_rms", squares=Rounding(mode="toward-zero"))


@breaks("ROUND-4", operations=(FINALIZE, FUSED), also=("ROUND-2",), when=_unscaled)
def inverse_of_unrounded_input(contract: Contract) -> Contract:
    """Takes the post-norm's inverse RMS of the FP32 sum, where nothing scales, and applies it to
    the rounded one."""
    return contract.take("post_inverse", all_reduce="reduce")


@breaks("ROUND-4", operations=(FINALIZE, FUSED), also=("ROUND-2",), when=_unscaled)
def norm_of_unrounded_input(contract: Contract) -> Contract:
    """Takes the post-norm of the FP32 sum, where nothing scales, instead of the rounded one."""
    taken = contract.take("post_inverse", all_reduce="reduce")
    return taken.take("post_norm", all_reduce="reduce")


@breaks("ROUND-4", source="sglang #25920")
def affine_after_rounding(contract: Contract) -> Contract:
    """Rounds before the affine multiply and again after it, as LlamaRMSNorm does."""
    return contract.each("affine", between=BF16)


@breaks("ROUND-4")
def affine_after_rounding_of_post_norm(contract: Contract) -> Contract:
    """Rounds before the affine multiply in the post-norm only: one path lost the option."""
    return contract.edit("post_norm", between=BF16)


@breaks("ROUND-4")
def affine_plus_one(contract: Contract) -> Contract:
    """Multiplies by 1 + weight, as Gemma's norm does."""
    return contract.each("affine", gain="1+w")


@breaks("ROUND-4")
def affine_missing(contract: Contract) -> Contract:
    """Leaves the affine multiply out."""
    return contract.each("affine", gain="none")


def _two_weights(values: Values) -> bool:
    return values["post_weight"] is not None and values["next_weight"] is not None


@breaks("ROUND-4", operations=_TWO_NORMS, when=_two_weights)
def norm_weights_swapped(contract: Contract) -> Contract:
    """Gives each norm the other's weight, where both have one."""
    swapped = contract.take("post_norm", post_weight="next_weight")
    return swapped.take("normalized", next_weight="post_weight")


@breaks("ROUND-4", operations=_TWO_NORMS)
def post_norm_not_rounded(contract: Contract) -> Contract:
    """Hands the post-norm's FP32 result to the residual add."""
    return contract.edit("post_norm", rounds=None)


@breaks("ROUND-4", operations=(FUSED,), when=_unfused)
def unfused_norms_twice(contract: Contract) -> Contract:
    """The "unfused" path runs the post-norm in the finalization and in the boundary too."""
    inverse, norm = (contract.step(name) for name in ("post_inverse", "post_norm"))
    return contract.insert(
        "post_norm",
        replace(inverse, name="inverse_again", args=("post_norm", "post_eps")),
        replace(norm, name="norm_again", args=("post_norm", "inverse_again", "post_weight")),
    )


# --- ROUND-5: the residual add --------------------------------------------------------------------


@breaks("ROUND-5")
def x_product_not_rounded(contract: Contract) -> Contract:
    """Keeps n * x_scale in FP32 into the add."""
    return contract.edit("x_product", rounds=None)


@breaks("ROUND-5")
def residual_product_not_rounded(contract: Contract) -> Contract:
    """Keeps residual * r_scale in FP32 into the add."""
    return contract.edit("r_product", rounds=None)


@breaks("ROUND-5")
def no_product_rounded(contract: Contract) -> Contract:
    """Computes both products and the sum in FP32, and rounds once."""
    return contract.edit("x_product", rounds=None).edit("r_product", rounds=None)


@breaks("ROUND-5")
def scales_swapped(contract: Contract) -> Contract:
    """Multiplies x by r_scale and the residual by x_scale."""
    swapped = contract.take("x_product", x_scale="r_scale")
    return swapped.take("r_product", r_scale="x_scale")


@breaks("ROUND-5")
def residual_scale_only(contract: Contract) -> Contract:
    """Applies r_scale and forgets x_scale."""
    return contract.without("x_product")


@breaks("ROUND-5")
def sum_scaled(contract: Contract) -> Contract:
    """Adds first, and multiplies the sum by x_scale."""
    scaled = replace(contract.step("x_product"), args=("rounded_sum", "x_scale"))
    rounded = Step("rounded_sum", "round", ("sum",), BF16, stage="residual")
    added = contract.without("x_product").without("r_product")
    return added.insert("sum", rounded, scaled)


@breaks("ROUND-5")
def scales_in_bf16(contract: Contract) -> Contract:
    """Rounds x_scale and r_scale to BF16."""
    return contract.edit("x_product", factor="bf16").edit("r_product", factor="bf16")


# --- ROUND-6: the next norm's input ---------------------------------------------------------------


@breaks("ROUND-6", source="vllm-omni #6878")
def next_norm_of_unrounded_hidden(contract: Contract) -> Contract:
    """Stores the rounded hidden, and normalizes the unrounded one."""
    return contract.take("next_inverse", hidden="sum").take("normalized", hidden="sum")


@breaks("ROUND-6")
def next_inverse_of_unrounded_hidden(contract: Contract) -> Contract:
    """Takes the next norm's inverse RMS of the unrounded hidden, its elements of the rounded."""
    return contract.take("next_inverse", hidden="sum")


@breaks("ROUND-6")
def next_elements_of_unrounded_hidden(contract: Contract) -> Contract:
    """Takes the next norm's inverse RMS of the rounded hidden, its elements of the unrounded."""
    return contract.take("normalized", hidden="sum")


@breaks("ROUND-6", also=("ROUND-4",))
def next_norm_before_residual(contract: Contract) -> Contract:
    """Normalizes what enters the residual add instead of what leaves it."""
    taken = contract.take("next_inverse", hidden="post_norm")
    return taken.take("normalized", hidden="post_norm")


# --- ROUND-7: the shared part and the all-reduce --------------------------------------------------


@breaks("ROUND-7", source="sglang #28237")
def shared_scaled(contract: Contract) -> Contract:
    """Multiplies the shared part by the routed scaling factor too."""
    args = ("shared_output", "routed_scale")
    scaled = Step("scaled_shared", "multiply", args, BF16, stage="shared", needs="shared_output")
    return contract.insert("shared_output", scaled)


@breaks("ROUND-7")
def shared_added_before_scale(contract: Contract) -> Contract:
    """Adds the shared part to the reduction, and scales the rounded sum."""
    return contract.move("scale", after="shared")


@breaks("ROUND-7", when=_shared)
def shared_added_to_unrounded_product(contract: Contract) -> Contract:
    """Adds the shared part to the scaled value before that is rounded, as an FMA would."""
    return contract.edit("scale", rounds=None)


@breaks("ROUND-7", also=("ROUND-2",), when=lambda values: _shared(values) and _unscaled(values))
def shared_added_to_unrounded_sum(contract: Contract) -> Contract:
    """Adds the shared part to the FP32 sum of the routes, and rounds once, where nothing scales."""
    return contract.edit("round", rounds=None).edit("scale", rounds=None)


@breaks("ROUND-7")
def shared_forgotten(contract: Contract) -> Contract:
    """Never adds the shared part."""
    return contract.without("shared")


@breaks("ROUND-7", operations=(ALLREDUCE,), when=lambda values: values["workspace"].rank > 0)
def shared_of_rank_zero_only(contract: Contract) -> Contract:
    """Takes the shared part for replicated, and adds rank 0's alone."""
    return contract.without("shared")


@breaks("ROUND-7", source="ROCm/aiter #2586", operations=(ALLREDUCE,))
def all_reduce_not_rounded(contract: Contract) -> Contract:
    """Carries the FP32 sum over ranks into the post-norm or the residual add."""
    return contract.edit("all_reduce", rounds=None)


@breaks("ROUND-7", operations=(ALLREDUCE,))
def all_reduce_in_bf16(contract: Contract) -> Contract:
    """Rounds the sum over ranks to BF16 after every rank."""
    return contract.edit("all_reduce", accumulator="bf16")


@breaks("ROUND-7", operations=(ALLREDUCE,))
def parts_not_rounded(contract: Contract) -> Contract:
    """Sums over ranks what each rank has in FP32, before its own last rounding."""
    args, given = ("scale",), "shared_output"
    rounded = Step("rounded_scale", "round", args, BF16, stage="shared", needs=given)
    kept = contract.edit("scale", rounds=None).edit("shared", rounds=None)
    return kept.insert("scale", rounded)


# --- ROUTE-3: the weights' dtype ------------------------------------------------------------------


def _weights(dtype: torch.dtype) -> Callable[[Values], bool]:
    return lambda values: _routed(values) and values["weights"].dtype is dtype


@breaks("ROUTE-3", when=_weights(torch.float32))
def fp32_weights_narrowed(contract: Contract) -> Contract:
    """Narrows the FP32 weights of a modular expert to BF16, the activation's dtype."""
    return contract.edit("reduce", weights="bf16")


@breaks("ROUTE-3", when=_weights(torch.float16))
def fp16_weights_narrowed(contract: Contract) -> Contract:
    """Converts FP16 weights to BF16 first, which loses three bits."""
    return contract.edit("reduce", weights="bf16")


# --- OWN-4: strategies ----------------------------------------------------------------------------


def _twoshot(values: Values) -> bool:
    tokens, workspace = values["residual"].shape[0], values["workspace"]
    return (values["strategy"] or Reference().choose_strategy(tokens, workspace)) == "twoshot"


@breaks("OWN-4", operations=(GATHER,), also=("ROUND-4",), when=_twoshot)
def twoshot_norm_not_rounded(contract: Contract) -> Contract:
    """The "twoshot" path keeps the post-norm in FP32 into the residual add; the others round."""
    return contract.edit("post_norm", rounds=None)


@breaks("OWN-4", operations=(GATHER,), also=("ROUND-2",), when=_unfused)
def unfused_gather_forgets_scale(contract: Contract) -> Contract:
    """The "unfused" path does not pass the routed scale on."""
    return contract.without("scale")
