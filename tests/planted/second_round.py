"""Planted bugs of a second round, written without a look at the tests, that survived them; and those of (e) of the
verdict, which came from it."""

F = "tests/test_second_round.py::"

# fmt: off
ROWS_OF_BUGS = [
    ('shipped_prompts_that_rank_are_of_one_domain', 'cotrain/data/prompts.py', 'place // len(DOMAINS))', 'place)', [F + 'test_shipped_prompts_that_rank_are_of_every_domain'], 46),
    ('draft_length_planned_on_final_prompts', 'cotrain/bench/planner.py', 'prompts = plan.ranking(size.quick_prompts, BATCH)', 'prompts = plan.final(size.quick_prompts, BATCH)', [F + 'test_no_final_prompt_has_a_say_in_the_draft_length'], 46),
    ('rounds_of_the_plan_on_final_prompts', 'cotrain/bench/planner.py', 'prompts = plan.ranking(0, max(size.quick_prompts, size.rows))', 'prompts = plan.final(0, max(size.quick_prompts, size.rows))', [F + 'test_no_final_prompt_has_a_say_in_the_draft_length'], 46),
    ('peak_memory_in_kib', 'inference/measure/floor.py', 'peak if sys.platform == "darwin" else peak * 1024', 'peak if sys.platform == "linux" else peak * 1024', [F + 'test_peak_memory_is_in_bytes'], 'peak memory is 1,024 times too small'),
    ('surprise_is_not_asked', 'inference/exactness/verdict.py', 'self.depth, self.logits, self.surprise)\n        return', 'self.depth, self.logits)\n        return', [F + 'test_tokens_after_the_accepted_ones_must_have_the_targets_law[greedy_last]'], 28),
    ('surprise_of_entropy_squared', 'inference/exactness/surprise.py', 'square - entropy.square()', 'square', [F + 'test_moments_are_those_of_the_law'], 28),
    ('tokens_without_mass_are_forgotten', 'inference/exactness/verdict.py', 'likely and self.impossible <= IMPOSSIBLE * self.tokens', 'likely', [F + 'test_tokens_that_settings_cut_are_counted'], 9),
    ('too_likely_texts_pass', 'inference/exactness/verdict.py', 'max(abs(self.z), abs(self.place_z)) < SURPRISE_SIGMAS', 'max(self.z, self.place_z) < SURPRISE_SIGMAS', [F + 'test_tokens_after_the_accepted_ones_must_have_the_targets_law[likeliest_correction]'], 28),
    ('look_up_is_not_surprised', 'inference/exactness/checks.py', 'return Verdict(text, calls, depth, logits, absent, surprise, lossy)', 'return Verdict(text, calls, depth, logits, absent, None, lossy)', [F + 'test_texts_of_a_look_up_are_judged_too'], 28),
    ('place_is_the_end_of_a_token', 'inference/exactness/surprise.py', '+ px / 2 - 0.5', '+ px - 0.5', [F + 'test_moments_are_those_of_the_law'], 2),
    ('places_are_not_judged', 'inference/exactness/verdict.py', 'max(abs(self.z), abs(self.place_z))', 'abs(self.z)', [F + 'test_coins_that_are_the_drafts_own_numbers_fail'], 2),
    ('an_end_id_of_zero_is_none', 'inference/request.py', 'ends = model.config.eos_token_id if ends is None else ends', 'ends = ends or model.config.eos_token_id', [F + 'test_an_end_id_of_zero_ends_a_text'], 21),
    ('tokens_made_are_counted_from_the_block', 'inference/exactness/teacher_forced.py', 'histories, [start + j for _, j in places], sampling)', 'histories, [j for _, j in places], sampling)', [F + 'test_penalties_count_the_tokens_of_every_block'], 11),
    ('lone_weight_of_a_loss_is_dropped', 'cotrain/losses/spec.py', 'if len(terms) == 1 and terms[0].weight == 1:', 'if len(terms) == 1:', [F + 'test_a_loss_that_stands_alone_has_its_weight'], 'loss.first=0.1*tv trains as tv'),
    ('manifest_outlives_its_rows', 'cotrain/rollout/kept_texts.py', '    beside(path, "json").unlink(missing_ok=True)', '    beside(path, "json")', [F + 'test_a_set_stopped_before_its_manifest_has_none'], 45),
    ('min_p_is_no_cut', 'inference/batched/laws.py', 's.top_p < 1 or s.min_p for s in sampling)\n        nucleus', 's.top_p < 1 for s in sampling)\n        nucleus', ['tests/test_drafting.py::test_text_and_counts_are_those_of_single_steps[truncated by min-p-3]'], 1),
    ('top_p_is_no_cut', 'inference/batched/laws.py', 's.top_p < 1 or s.min_p for s in sampling)\n        nucleus', 's.min_p for s in sampling)\n        nucleus', ['tests/test_drafting.py::test_text_and_counts_are_those_of_single_steps[truncated by top-p-3]'], 1),
]
