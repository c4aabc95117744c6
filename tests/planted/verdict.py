"""Planted bugs of the exactness verdict, and of what an earlier list of planted bugs did not notice."""

# fmt: off
W, G = "tests/test_wrong_engines.py::test_", "tests/test_verdict_gaps.py::test_"
EXACT, TIES, AGREE, PARITY = "inference/exactness.py", "inference/ties.py", "inference/agreement.py", "inference/parity.py"
WINDOW, SCALED = W + "verifying_passes_that_see_the_last_tokens_alone_fail[bfloat16]", W + "attention_of_another_scale_in_every_pass_fails[bfloat16]"
TIE, COMPILED = W + "the_comparison_goes_on_behind_a_tie[0.3-False]", W + "what_is_judged_is_the_compiled_engine"
ROUNDED = W + "a_rounded_draft_is_predicted_with_its_rounded_weights"
DOUBLE, CONTEXT = W + "an_exact_engine_passes_in_every_dtype[float64-1]", W + "a_draft_with_a_smaller_context_is_predicted_as_it_drafts"

ROWS_OF_BUGS = [
    ("verifying_passes_see_the_last_24", "inference/forward.py", "return additive(visible(window, self.model.device), self.shape.held)", "return additive(visible(window, self.model.device, 24), self.shape.held)", [DOUBLE], 35),
    ("attention_scaled_in_every_pass", "inference/lean.py", "attention.head_dim, attention.scaling, eps, held", "attention.head_dim, 1.5 * attention.scaling, eps, held", [DOUBLE], 35),
    ("noise_excuses_itself", TIES, "min(MARGIN * noise, difference.limit)", "MARGIN * noise", [W + "a_gap_beyond_the_dtype_is_no_tie_however_noisy_the_passes"], 35),
    ("gaps_beyond_the_dtype_are_kept_as_ties", TIES, "g=one.g.new_empty(0), limit=-math.inf", "g=one.g.new_empty(0), limit=math.inf", [TIE], 35),
    ("logits_judged_without_a_dtype_bound", AGREE, "limit=min(max(MARGIN * _mean(own), least), bound)", "limit=max(MARGIN * _mean(many), least)", [SCALED], 35),
    ("own_rounding_of_the_passes_judged", AGREE, "known = {i: _forward(lm.model, prompts[i], texts[i])[", "known = {i: next(teacher_forced(lm, prompts[i : i + 1], texts[i : i + 1], Sampling(), block=LONGEST)).logits[0][", [SCALED], 35),
    ("one_token_passes_alone_are_judged", AGREE, "width, ids) for ids in (1, width)", "width, ids) for ids in (1, 1)", [WINDOW], 29),
    ("verdict_of_an_eager_engine", EXACT, "    logits = check_logits(engine.target, ", "    logits = check_logits(Engine(engine.target.model, rows=engine.rows).target, ", [COMPILED], 36),
    ("plain_compared_with_plain", EXACT, 'coupled.rule = "coupled"', 'coupled.rule, coupled.proposer = "coupled", None', [W + "texts_are_those_of_rounds_with_drafts"], "(a) sees no speculative text"),
    ("one_row_is_compared", EXACT, "engine.target, prompts, made, sampling, width", "engine.target, prompts[:1], made[:1], sampling, width", [W + "texts_are_those_of_rounds_with_drafts"], "(a) sees one text"),
    ("comparison_ends_at_a_tie", TIES, "for a, j in ((choice != block.x) & block.valid).nonzero().tolist():", "for a, j in ((choice != block.x) & block.valid).nonzero().tolist()[:0]:", [WINDOW], 25),
    ("rounded_draft_predicted_unrounded", PARITY, "q_lm = LM(engine.target.model, rows, V), LM(draft.model, rows, V, int8=draft.int8)", "q_lm = LM(engine.target.model, rows, V), LM(draft.model, rows, V)", [ROUNDED], 37),
    ("sigma_of_calls_doubled", EXACT, "sigma=math.sqrt(found.variance + near)", "sigma=2 * math.sqrt(found.variance + near)", [W + "sigma_is_that_of_the_coins"], "(b) passes what it should not"),
    ("rare_rounds_are_not_counted", PARITY, "found += int(seldom[b", "found += 0 * int(seldom[b", [W + "a_draft_law_of_another_temperature_fails[float32]"], 1),
    ("draft_context_ignored_in_prediction", PARITY, "min(limit - t - 1, context - len(prompt) - t) for t", "limit - t - 1 for t", [CONTEXT], "rounds that draft nothing are predicted as if they did"),
    ("draft_context_ignored_in_decoding", "inference/proposers/independent.py", "k = [max(0, min(k, self.lm.context - len(text))) for k, text", "k = [max(0, k) for k, text", [CONTEXT], "a draft reads positions that it does not have"),
    ("min_p_of_another_row", "inference/sampling.py", "(one.temperature, one.top_k, one.top_p, one.min_p)", "(one.temperature, one.top_k, one.top_p)", [G + "rows_that_differ_in_min_p_alone_keep_their_own"], 10),
    ("penalty_before_bias", "inference/processors.py", "steps.append(_plain(RepetitionPenaltyLogitsProcessor(", "steps.insert(0, _plain(RepetitionPenaltyLogitsProcessor(", [G + "bias_comes_before_the_repetition_penalty_as_in_transformers"], 10),
    ("decode_only_speedup_with_prefill", "inference/report.py", "timing.ratio(arm, over, decode=True)", "timing.ratio(arm, over)", [G + "decode_only_figures_are_without_prefill"], 27),
]
