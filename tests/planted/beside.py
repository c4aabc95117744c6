"""Runs of a sweep beside each other."""

# fmt: off
ROWS_OF_BUGS = [
    ('beside_predicted_is_measured', 'inference/report/table.py', '_number(tau["predicted"]), value, interval', '_number(tau["measured"]), value, interval', ['tests/test_sweep_table.py::test_reports_beside_each_other_say_what_each_of_them_says'], 'a prediction that is always right'),
    ('beside_says_exact', 'inference/report/table.py', '"yes" if exact["passed"] else "NO"', '"yes"', ['tests/test_sweep_table.py::test_reports_beside_each_other_say_what_each_of_them_says'], 'a draft that is not exact is said to be'),
    ('sweep_of_what_was_not_measured', 'cotrain/commands/train.py', 'if len(reports) > 1:', 'if reports:', ['tests/test_sweep_table.py::test_a_sweep_shows_the_runs_that_were_measured'], 'one run shown as a sweep'),
    ('depths_of_acceptance_lost', 'cotrain/evaluation/comparison.py', 'if found.alphas else {}', 'if not found.alphas else {}', ['tests/test_figures_by_hand.py::test_every_figure_is_what_loops_over_whole_laws_say'], 'acceptance by depth is not kept'),
    ('gate_of_another_cell', 'tests/studies/kinds_in_turn.py', 'self.figures.pop((draft.name, temperature), None)', 'pass', ['tests/test_proposer_study.py::test_a_gate_is_counted_in_each_cell'], 'planned with the drafts of another gate'),
    ('study_on_shipped_prompts', 'tests/studies/proposers.py', 'given=given, kind', 'kind', ['tests/test_proposer_study.py::test_a_gate_is_counted_in_each_cell'], 'prompts that were asked for are not those that are timed'),
    ('ceiling_fills_the_flattest_first', 'tests/studies/one_pass_ceiling.py', 'descending=True', 'descending=False', ['tests/test_one_pass_ceiling.py::test_no_law_of_a_grid_is_better'], 'a law that is not the best'),
    ('ceiling_of_refused_rounds', 'tests/studies/one_pass_ceiling.py', 'reach = reach * (q', 'reach = (q', ['tests/test_one_pass_ceiling.py::test_a_coin_that_decides_the_next_token'], 'rounds go on behind a refusal'),
    ('ceiling_weights_forgotten', 'tests/studies/one_pass_ceiling.py', 'weights[order].flip(0)', 'torch.ones_like(masses).flip(0)', ['tests/test_one_pass_ceiling.py::test_weights_decide_whose_law_is_drafted'], 'rounds that never come so far decide a law'),
    ('edit_of_the_whole_piece', 'tests/studies/mixed_prompts.py', 'lines[: len(lines) // 2]', 'lines', ['tests/test_mixed_prompts.py::test_an_edit_repeats_half_of_the_piece_with_a_name_changed'], 'an edit that is done'),
    ('gain_over_a_bad_rate', 'tests/studies/gain_by_kind.py', 'best(at(compare(runs, kl_labels[0])), True).label', 'kl_labels[0]', ['tests/test_gain_by_kind.py::test_the_best_rates_are_compared'], 'a gain over forward KL at a rate that is not its best'),
    ('gain_of_another_depth', 'tests/studies/gain_by_kind.py', 'one.get("alphas") or [one["alpha"]]', '[one["alpha"]] * len(one.get("alphas") or [0])', ['tests/test_gain_by_kind.py::test_the_best_rates_are_compared'], 'the first depth said to be all'),
    ('kinds_measured_before_are_lost', 'tests/studies/gain_by_kind.py', '[*kept, *rows]', 'rows', ['tests/test_gain_by_kind.py::test_table_report_and_figure'], 'a report that forgets'),
    ('ceiling_judged_on_what_it_was_fitted_to', 'tests/studies/one_pass_ceiling.py', '[(halves[0], halves[1]), (halves[1], halves[0])]', '[(halves[0], halves[0]), (halves[1], halves[1])]', ['tests/test_one_pass_ceiling.py::test_below_is_judged_on_continuations_that_fitted_nothing'], 'what no law can reach is said to be one that there is'),
    ('ceiling_of_another_temperature', 'tests/studies/one_pass_ceiling.py', 'logits.double() / sampling.temperature', 'logits.double() / 1.0', ['tests/test_one_pass_ceiling.py::test_laws_are_those_that_made_the_continuations[0.7]'], 'laws that made none of the continuations'),
    ('gain_of_most_acceptance', 'tests/studies/gain_by_kind.py', 'key=lambda gain: gain.tau)', 'key=lambda gain: gain.alpha)', ['tests/test_gain_by_kind.py::test_the_best_rates_are_compared'], 'the loss that accepts most at the first depth is not the one of most tau'),
    ('edits_of_code_that_is_learnt', 'tests/studies/mixed_prompts.py', 'embedded("code", "held_out", BYTES)', 'embedded("code", "train", BYTES)', ['tests/test_mixed_prompts.py::test_prompts_are_of_texts_that_no_draft_learns_from'], 'prompts that a draft has learnt'),
]
