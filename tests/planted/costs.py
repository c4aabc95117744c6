"""Planted bugs of the splits of prompts, block tau, costs of real rounds, and timing beside other work."""

S, C = "tests/test_splits.py::test_", "tests/test_real_costs.py::test_"

# fmt: off
ROWS_OF_BUGS = [
    ("winner_timed_on_prompts_that_rank", "cotrain/job.py", "return apart(ranking, final, learnt, \"own\")", "return Prompts(ranking[1:] or final, learnt[:1], \"own\")", [S + "a_run_with_own_data_times_on_prompts_of_no_other_split"], 46),
    ("own_data_in_two_splits", "cotrain/splits.py", "        place -= percent\n", "        pass\n", [S + "content_decides_about_the_split"], 46),
    ("overlap_by_index", "cotrain/splits.py", "    taken = {tuple(prompt) for prompt in shared(prompts, others)}", "    taken = {tuple(prompt) for prompt, other in zip(prompts, others) if prompt == other}", [S + "final_prompts_are_none_that_were_learnt_from"], 46),
    ("beginnings_are_other_prompts", "cotrain/splits.py", "begins_one(prompt) or begun_by_one(prompt)", "tuple(prompt) in whole", [S + "equal_prompts_and_beginnings_are_shared_content"], 46),
    ("overlap_is_not_refused", "cotrain/splits.py", "        refuse_shared(self.final, self.ranking, \"rank checkpoints\")", "        pass", [S + "equal_prompts_and_beginnings_are_shared_content"], 46),
    ("block_ranked_by_token_tau", "cotrain/evaluate.py", "        if verify == \"block\":\n            return float(tau_block(self.l, k, self.lengths))\n", "", [S + "two_drafts_that_the_rules_rank_differently"], "checkpoints are ranked for another rule than the one that serves"),
    ("rule_of_ranking_is_dropped", "cotrain/module.py", "else found.tau(k, verify)", "else found.tau(k)", [S + "checkpoints_are_ranked_by_the_rule_that_verifies"], "checkpoints are ranked for another rule than the one that serves"),
    ("calls_block_of_clamped_ratios", "cotrain/terms.py", "acceptance.calls_block(acceptance.l_from(logp, logq), k, lengths)", "acceptance.calls_block(acceptance.l_from(logp, logq).clamp(max=0), k, lengths)", ["tests/test_terms.py::test_calls_under_block_verification_by_hand"], 24),
    ("level_of_parts_alone", "inference/real_costs.py", "np.array(says) * np.interp(lengths, known, factors)", "np.array(says) * np.interp(lengths, known, factors) ** 0", [C + "the_table_keeps_its_shape_at_the_level_of_real_rounds"], "costs are those of parts alone and warm, not of rounds"),
    ("drafting_of_parts_alone", "inference/real_costs.py", "draft=step,", "draft=table.draft,", [C + "rounds_are_timed_in_real_calls_of_the_engine"], "a draft that is slow in a run seems fast, and too many tokens are drafted"),
    ("first_call_is_timed", "inference/real_costs.py", "            if repeat:  # the first makes graphs and warms up\n", "            if True:\n", [C + "the_call_that_warms_up_is_not_counted"], "compiling counts as a cost of rounds"),
    ("policy_left_changed", "inference/real_costs.py", "        engine.policy = own\n", "        pass\n", [C + "rounds_are_timed_in_real_calls_of_the_engine"], "the engine that is timed drafts another number than planned"),
    ("plain_decoding_not_considered", "cotrain/planner.py", "ALWAYS = (0, 1)", "ALWAYS = (1, 2)", [C + "plain_decoding_and_one_draft_are_considered_whatever_the_depths"], "a slow-down is planned"),
    ("length_believed_unrun", "cotrain/planner.py", "        found = found.at(rounds_of(plan, (length.drafting,), until))\n", "        break\n", [C + "a_length_that_was_chosen_is_run_before_it_is_believed"], "the draft length is the table's, not the engine's"),
    ("compiled_by_parts_alone", "cotrain/planner.py", "part(both[1].costs) < part(both[0].costs)", "part(both[1].alone) < part(both[0].alone)", [C + "each_part_runs_compiled_where_real_rounds_are_faster_so"], "what is faster alone and slower in a run is chosen"),
    ("slow_down_unsaid", "cotrain/planner.py", "if high < 1 or (length.k == 0 and low <= 1):", "if high < 0:", [C + "a_slow_down_is_said_in_words"], "a draft that slows down is exported without a word"),
    ("stops_at_the_first_look", "inference/adaptive.py", "            if near <= wanted.within and len(runs) >= min(least, LEAST, len(batches)):", "            if True:", [C + "timing_goes_on_until_the_interval_is_narrow"], "a noisy minute gives a wide interval"),
    ("stops_at_a_lucky_value", "inference/adaptive.py", "            if near <= wanted.within and len(runs) >= min(least, LEAST, len(batches)):", "            if near <= wanted.within or _timing(batches, runs).ratio(*pair).value > 1.55:", [C + "stopping_does_not_favour_fast_or_slow_drafts"], "timing stops where the value is high"),
    ("two_batches_are_enough", "inference/adaptive.py", "near <= wanted.within and done >= least", "near <= wanted.within", [C + "when_time_is_over_what_was_reached_is_said"], "a narrow interval of two batches is believed"),
    ("no_limit_of_time", "inference/adaptive.py", "if done >= 2 and clock() + spent / (done + 1) > wanted.until:", "if done >= 10**6:", [C + "when_time_is_over_what_was_reached_is_said"], "a measurement without an end"),
    ("repeats_are_other_batches", "inference/adaptive.py", "        if round:\n            runs[at].append(result)", "        if round:\n            batches.append(batches[at])\n            runs.append([result])", [C + "timing_goes_on_until_the_interval_is_narrow"], "repeats of a prompt count as new prompts"),
    ("own_time_is_others", "inference/contention.py", "    spent = (after.busy - before.busy) - (after.own - before.own)", "    spent = after.busy - before.busy", [C + "what_others_used_is_what_is_left"], "a measurement disturbs itself"),
    ("stolen_time_unseen", "inference/contention.py", "irq + soft + steal, idle", "irq + soft, idle", [C + "busy_time_is_of_the_cores_of_this_process_and_holds_stolen_time"], "another guest of the host is not seen"),
    ("threads_spin_beside_others", "inference/contention.py", "if disturbed(others(before, reading(stat)), cores()) is False:", "if disturbed(others(before, reading(stat)), cores()) is not None:", [C + "threads_wait_passively_unless_the_machine_is_idle"], "ten times slower beside another process"),
]
