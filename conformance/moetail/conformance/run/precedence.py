"""In which order checks are believed.

A broken implementation fails more than the one check that is about its fault: an output that is not
written is not right either. So results are read in this order, and the first violation names the
rule. A check stands behind all those whose faults would fail it too:

- refusals look at nothing but whether something was raised;
- what is not written, differs from run to run, or is left over from another call spoils every
  comparison and every value;
- comparisons of bits between two calls come before values, since a wrong rounding passes them;
- then values, in the order of the arithmetic, each on sources on which the others do not decide;
- whole tails last.
"""

from __future__ import annotations

__all__ = ["PRECEDENCE", "precedence"]

PRECEDENCE: tuple[str, ...] = (
    # refusals
    "test_convert_2_illegal_layouts_are_refused",
    "test_convert_4_a_destination_is_aliased",
    "test_pack_1_refuses_rows_that_are_not_dense",
    "test_domain_1_refuses_what_is_outside",
    "test_domain_1_no_workspace_that_cannot_serve",
    # conversions: what is copied has the right values, so that copies come first
    "test_convert_3_nothing_is_copied",
    "test_pack_3_route_major_map",
    "test_convert_1_legal_layouts_are_accepted",
    # shapes, and what spoils everything else
    "test_live_2_zero_tokens_give_empty_outputs",
    "test_run_3_every_element_is_written",
    "test_route_4_a_token_without_routes_is_written",
    "test_run_7_negative_zeros_do_not_hang",
    "test_run_1_the_same_bits_run_after_run",
    "test_run_2_inputs_are_not_modified",
    "test_run_2_nothing_around_the_tensors_is_touched",
    "test_run_4_changed_inputs_in_the_same_buffers",
    "test_run_4_on_the_current_stream",
    "test_run_4_a_replayed_graph_equals_eager",
    "test_run_5_one_workspace_serves_any_sequence",
    "test_domain_2_a_refusal_changes_nothing",
    "test_own_4_a_workspace_has_its_fields",
    # what must not matter
    "test_live_1_only_live_slots_are_read",
    "test_route_1_weights_of_remote_routes_change_no_bit",
    "test_route_1_remote_routes_contribute_nothing_to_others",
    "test_pack_2_padding_changes_no_bit",
    "test_route_2_permuting_rows_changes_no_bit",
    "test_run_6_offsets_past_two_to_the_31",
    "test_run_6_tokens_past_two_to_the_31_elements",
    "test_own_1_consecutive_blocks_without_padding",
    "test_own_2_padding_contributes_nothing_on_two_ranks",
    "test_own_1_consecutive_blocks",
    "test_own_2_padding_contributes_nothing",
    "test_live_1_only_live_slots_are_gathered",
    "test_own_3_replicas_are_bit_identical",
    # values
    "test_route_4_a_token_without_routes_is_zero",
    "test_route_3_weights_of_every_dtype_are_read",
    "test_route_5_nan_and_infinity_propagate",
    "test_route_1_remote_routes_contribute_nothing",
    "test_pack_3_route_major_is_the_identity",
    "test_round_1_the_reduction_accumulates_in_fp32",
    "test_round_3_to_nearest_ties_to_even",
    "test_route_3_weights_are_read_in_their_dtype",
    "test_round_4_norms_are_fp32_on_the_rounded_input",
    "test_round_2_rounded_before_the_scale_and_after",
    "test_round_7_shared_after_the_scale_and_ranks_before_the_norm",
    "test_round_3_of_sums_with_the_shared_part",
    "test_round_5_each_residual_product_is_rounded",
    "test_round_6_the_next_norm_takes_the_rounded_hidden",
    "test_round_4_norm_weights_of_any_size",
    "test_own_4_the_default_follows_the_thresholds",
    "test_own_4_every_strategy_conforms",
    "test_run_7_negative_zeros_in_the_payload",
    # everything at once
    "test_tail_on_real_layers",
    "test_tail_on_every_source",
    "test_tail_on_any_case",
)


def precedence(check: str) -> int:
    """A check's place; a check that is not listed comes last."""
    return PRECEDENCE.index(check) if check in PRECEDENCE else len(PRECEDENCE)
