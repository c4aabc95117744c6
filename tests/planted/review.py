"""Planted bugs that were written without a look at the tests, and survived them."""

G, F = "tests/test_review_gaps.py::test_", "tests/test_faults.py::test_nan_of_refused_drafts_is_never_held_against_a_text"
E = "tests/test_errors_are_seen.py::test_"

# fmt: off
ROWS_OF_BUGS = [
    ("row_stored_again_without_its_text", "inference/engine.py", "store_prompts(self.target, slot, [row.text])", "store_prompts(self.target, slot, [row.text[: row.prompt]])", [F], 41),
    ("ids_behind_a_rows_drafts_are_read", "inference/engine.py", "            x = torch.where(drafted, x, anchor)\n", "", [F], 41),
    ("drafts_of_earlier_rounds_trusted", "inference/engine.py", "row.stained or proposal.k[slot] > 0", "proposal.k[slot] > 0", [F], 41),
    ("banned_word_forgets_the_prompt", "inference/history.py", "return [_last(row.text, self.width)", "return [_last(row.new, self.width)", [G + "a_banned_word_may_begin_in_the_prompt"], 11),
    ("last_processor_alone_counts", "inference/own.py", "scores = processor(ids, scores)", "scores = processor(ids, place.clone())", [G + "own_processors_act_one_after_the_other"], 11),
    ("three_ids_lacking_drafted_at_once", "inference/proposers/independent.py", "behind > 2 or", "behind > 3 or", [G + "no_hole_is_left_behind_rounds_without_drafts"], 16),
    ("worst_token_of_narrow_passes_alone", "inference/agreement.py", "worst=float(torch.cat([one, many]).max())", "worst=float(one.max())", [G + "a_wrong_token_of_wide_passes_alone_is_held_against_the_worst"], 35),
    ("plain_token_moved_up_at_an_edge", "inference/ties.py", "(difference.plain, -noise)", "(difference.plain, noise)", [G + "a_token_that_leaves_the_kept_ones_makes_a_tie"], 25),
    ("error_row_is_timed", "inference/arms.py", "        ).whole()\n", "        )\n", [E + "what_is_timed_is_whole"], 41),
    ("error_row_is_compared", "inference/exactness.py", "out.whole().tokens", "out.tokens", [E + "a_text_that_is_compared_is_whole"], 41),
    ("error_row_is_kept_as_a_sample", "cotrain/rollout.py", "filter(None, out.errors)", "filter(None, ())", [E + "a_sampled_text_is_whole"], 41),
]
