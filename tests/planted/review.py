"""Planted bugs that were written without a look at the tests, and survived them."""

# fmt: off
ROWS_OF_BUGS = [
    ('row_stored_again_without_its_text', 'inference/slots.py', 'store_prompts(self.target, slot, [row.text])', 'store_prompts(self.target, slot, [row.text[: row.prompt]])', ['tests/test_faults.py::test_nan_of_refused_drafts_is_never_held_against_a_text'], 41),
    ('ids_behind_a_rows_drafts_are_read', 'inference/engine.py', '            x = torch.where(drafted, x, anchor)\n', '', ['tests/test_faults.py::test_nan_of_refused_drafts_is_never_held_against_a_text'], 41),
    ('banned_word_forgets_the_prompt', 'inference/batched/history.py', 'return [_last(row.text, self.width)', 'return [_last(row.new, self.width)', ['tests/test_review_gaps.py::test_a_banned_word_may_begin_in_the_prompt'], 11),
    ('last_processor_alone_counts', 'inference/batched/user_processors.py', 'scores = processor(ids, scores)', 'scores = processor(ids, place.clone())', ['tests/test_review_gaps.py::test_own_processors_act_one_after_the_other'], 11),
    ('three_ids_lacking_drafted_at_once', 'inference/proposers/independent.py', 'if any(wanted and end - stored > self.tail for', 'if any(wanted and end - stored > self.tail + 1 for', ['tests/test_review_gaps.py::test_no_hole_is_left_behind_rounds_without_drafts'], 16),
    ('worst_token_of_narrow_passes_alone', 'inference/exactness/agreement.py', 'worst=float(torch.cat([one, many]).max())', 'worst=float(one.max())', ['tests/test_review_gaps.py::test_a_wrong_token_of_wide_passes_alone_is_held_against_the_worst'], 35),
    ('plain_token_moved_up_at_an_edge', 'inference/exactness/ties.py', '(difference.plain, -noise)', '(difference.plain, noise)', ['tests/test_review_gaps.py::test_a_token_that_leaves_the_kept_ones_makes_a_tie'], 25),
    ('error_row_is_timed', 'inference/measure/arms.py', '        ).whole()\n', '        )\n', ['tests/test_errors_are_seen.py::test_what_is_timed_is_whole'], 41),
    ('error_row_is_compared', 'inference/exactness/checks.py', 'out.whole().tokens', 'out.tokens', ['tests/test_errors_are_seen.py::test_a_text_that_is_compared_is_whole'], 41),
    ('error_row_is_kept_as_a_sample', 'cotrain/rollout/samplers.py', 'filter(None, out.errors)', 'filter(None, ())', ['tests/test_errors_are_seen.py::test_a_sampled_text_is_whole'], 41),
    ('a_wrong_place_drowned_in_right_ones', 'inference/models/probe.py', 'return Found(float(apart.max()), FINE if', 'return Found(float(apart.mean()), FINE if', ['tests/test_selfcheck.py::test_a_forward_that_is_wrong_at_one_place_is_caught'], 'a forward that is wrong at one place is taken for rounding'),
    ('the_larger_of_noise_and_bound_excuses', 'inference/exactness/verdict.py', 'return min(MARGIN * self.noise, self.limit)', 'return max(MARGIN * self.noise, self.limit)', ['tests/test_wrong_engines.py::test_neither_noisy_passes_nor_a_wide_bound_alone_excuse'], 35),
    ('shares_of_no_domain', 'cotrain/training/preconditions.py', 'if unknown := sorted(set(cfg.data.shares) - known):', 'if unknown := sorted(set(cfg.data.shares) & known):', ['tests/test_preconditions.py::test_check_and_run_refuse_alike_before_a_weight_is_read[data.shares={cod:0.5}]'], 'a misspelt domain changes nothing, in silence'),
]
