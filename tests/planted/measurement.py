"""Planted bugs of timing, statistics, the exactness verdict and reports."""

# fmt: off
ROWS_OF_BUGS = [
    ('bootstrap_unpaired', 'inference/measure/timing.py', 'y[drawn].sum(1)', 'y[drawn[::-1]].sum(1)', ['tests/test_measure.py::test_ratio_is_of_sums_and_its_interval_is_paired'], "an interval that the machine's drift widens"),
    ('arms_in_a_fixed_order', 'inference/measure/timing.py', '_rotated(arms, place)', '_rotated(arms, 0)', ['tests/test_measure.py::test_arms_take_turns_on_every_batch'], 'drift of the machine falls on one arm'),
    ('timed_run_that_ends_early', 'inference/measure/arms.py', 'ids=ids, ignore_eos=True', 'ids=ids, ignore_eos=False', ['tests/test_measure.py::test_engine_arm_ignores_end_tokens_and_counts'], 'speeds of texts of other lengths are compared'),
    ('transformers_defaults_leak', 'inference/measure/arms.py', 'stack.enter_context(_using(model, config))', 'settings.setdefault("max_new_tokens", max_new_tokens)', ['tests/test_measure.py::test_transformers_arm_samples_from_the_regime_asked_for'], 10),
    ('conditional_is_prefix', 'inference/stats.py', 'self.tried[depth] += depth <= accepted', 'self.tried[depth] += 1', ['tests/test_measure.py::test_counts_by_depth_tell_prefix_from_conditional'], 27),
    ('round_starts_late', 'inference/stats.py', 'starts.append(self.rows[row].tokens)', 'starts.append(self.rows[row].tokens + tokens)', ['tests/test_measure.py::test_starts_of_rounds_are_kept_by_row'], 28),
    ('alpha_is_not_the_overlap', 'inference/exactness/side_by_side.py', 'torch.minimum(p, q).sum(-1)', 'torch.maximum(p, q).sum(-1)', ['tests/test_verdict.py::test_a_wrong_draft_law_that_accepts_too_much_fails'], 28),
    ('match_predicted_as_token', 'inference/verify/rules.py', 'Rule("match", _match, _match_reach)', 'Rule("match", _match, _token_reach)', ['tests/test_verdict.py::test_an_exact_engine_passes[match-sampling2]'], 'calls predicted for another rule'),
    ('greedy_draft_with_a_soft_law', 'inference/exactness/side_by_side.py', '    if greedy:\n        q = one_hot', '    if not greedy:\n        q = one_hot', ['tests/test_verdict.py::test_certain_drafts_are_predicted_to_the_call[greedy1]'], 1),
    ('every_difference_is_a_tie', 'inference/exactness/ties.py', 'return difference.gap <= noise or any(', 'return difference.gap >= noise or any(', ['tests/test_verdict.py::test_one_changed_token_is_unexplained'], 25),
    ('ties_at_truncation_edges_unseen', 'inference/exactness/ties.py', '((difference.other, noise), (difference.plain, -noise))', '()', ['tests/test_verdict.py::test_a_tie_is_a_gap_or_an_edge_within_the_noise'], 25),
    ('noise_of_equal_passes', 'inference/exactness/ties.py', 'sampling, width=width, **settings', 'sampling, width=1, **settings', ['tests/test_verdict.py::test_noise_is_what_wide_passes_change'], 29),
    ('teacher_forced_one_late', 'inference/exactness/teacher_forced.py', '[len(prompt) - 1 + start for prompt', '[len(prompt) + start for prompt', ['tests/test_verdict.py::test_teacher_forcing_gives_the_logits_of_whole_texts'], 14),
    ('history_ignored_in_the_check', 'inference/exactness/teacher_forced.py', 'if needs_history(sampling):', 'if not needs_history(sampling):', ['tests/test_verdict.py::test_teacher_forcing_applies_the_history_of_each_token'], 11),
    ('lengths_planned_for_the_token_rule', 'cotrain/bench/planner.py', 'reach = reach_of(figures, verify, k)', 'reach = reach_of(figures, "token", k)', ['tests/test_matrix.py::test_the_length_is_planned_for_the_rule_that_verifies'], 'block verification drafts too few'),
    ('short_drafts_timed_as_long_ones', 'inference/measure/costs.py', 'drafting = {k: copy(proposer) for k in lengths}', 'drafting = dict.fromkeys(lengths, proposer)', ['tests/test_drafting.py::test_costs_are_of_as_many_drafts_as_are_asked_for'], 'each draft seems free, and the longest length is chosen'),
    ('drafting_measured_through_the_origin', 'inference/measure/costs.py', 'found["draft", short] - short * step', '0.0', ['tests/test_measure.py::test_drafting_is_a_line_through_two_lengths'], 'the first draft of a round seems free'),
    ('table_of_one_way_alone', 'inference/measure/costs.py', 'target=(plain.target[0], *target.target[1:])', 'target=target.target', ['tests/test_measure.py::test_a_table_is_joined_of_the_ways_that_are_run'], 'the bound is of a plain path that nobody runs'),
    ('best_length_stops_at_a_cliff', 'inference/measure/costs.py', 'k = max(range(len(speedups)), key=speedups.__getitem__)', 'k = 1 if len(speedups) > 1 and speedups[1] > 1 else 0', ['tests/test_measure.py::test_best_length_looks_past_a_cliff_and_may_be_none'], 'the draft length is chosen by a local rule'),
    ('report_with_nan', 'inference/report/schema.py', 'real and math.isfinite(value)', 'real', ['tests/test_report.py::test_a_wrong_report_is_refused_by_key'], 'report.json that no JSON reader takes'),
]
