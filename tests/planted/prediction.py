"""Planted bugs of the losses, the chunked rows and the exact prediction of target calls."""

# fmt: off
PREDICT, LOSSES, ROWS = "inference/predict.py", "cotrain/losses.py", "cotrain/rows.py"
A, L, R = "tests/test_acceptance.py::test_", "tests/test_losses.py::test_", "tests/test_rows.py::test_"
PROCESS = A + "calls_are_those_of_the_process"

ROWS_OF_BUGS = [
    ("predict_depth_of_another_round", PREDICT, "shifted = [(r if r.ndim == 2 else r[..., j])[:, j:] for j in range(depths)]", "shifted = [(r if r.ndim == 2 else r[..., 0])[:, j:] for j in range(depths)]", [PROCESS + "[2-by_depth-True-token]"], 27),
    ("predict_forgets_the_bonus_token", PREDICT, "return reach - F.pad(reach[..., 1:], (0, 1))", "return reach - F.pad(reach[..., 1:], (0, 1), value=1.0) * (reach > 0)", [A + "no_draft_costs_a_call_a_token"], 20),
    ("predict_block_as_token", PREDICT, "torch.cummin(F.pad(sums, (1, 0)), -1).values.exp()", "F.pad(sums, (1, 0)).clamp(max=0).exp()", [PROCESS + "[3-alike-False-block]"], 24),
    ("predict_reads_past_a_texts_end", PREDICT, "return values.masked_fill(token >= _lengths(r, lengths)[:, None, None], fill)", "return values.masked_fill(token >= r.shape[1], fill)", [PROCESS + "[2-alike-False-token]"], 21),
    ("predict_variance_without_the_next_rounds", PREDICT, "spread = (jump * (variance + (mean + 1 - now) ** 2)).sum(-1, keepdim=True)", "spread = (jump * (mean + 1 - now) ** 2).sum(-1, keepdim=True)", [PROCESS + "[2-alike-False-token]"], 28),
    ("predict_prefix_counts_drafts_past_the_end", PREDICT, "(ends <= _lengths(r, lengths)[:, None, None])", "(ends <= ends.max() + _lengths(r, lengths)[:, None, None])", [A + "simulation_of_one_text"], 27),
    ("predict_conditional_is_prefix", PREDICT, "    return accepted / tried", "    return accepted / _by_depth(r, k, lengths)[1]", [A + "simulation_of_one_text"], 27),
    ("predict_ratio_above_one", PREDICT, "return l_from(logp_x, logq_x).clamp(max=0).exp()", "return l_from(logp_x, logq_x).exp()", [A + "ratio_edges"], 28),
    ("tau_as_a_mean_of_ratios", PREDICT, "return _lengths(r, lengths).sum() / expected_calls(r, k, lengths).sum()", "return (_lengths(r, lengths) / expected_calls(r, k, lengths)).mean()", [A + "tau_is_a_ratio_of_sums"], 27),
    ("kl_is_cross_entropy", LOSSES, "return (logp.exp() * (_finite(logp) - _finite(logq))).sum(-1)", "return (logp.exp() * -_finite(logq)).sum(-1)", [L + "equal_laws_cost_nothing"], "a loss under another's name"),
    ("kl_zero_times_infinity", LOSSES, "return (logp.exp() * (_finite(logp) - _finite(logq))).sum(-1)", "return (logp.exp() * (logp - _finite(logq))).sum(-1)", [L + "edges_are_finite[kl-dtype0]"], 7),
    ("nla_nan_at_zero_overlap", LOSSES, "total = torch.logsumexp(logs.masked_fill(empty[..., None], 0.0), -1)", "total = torch.logsumexp(logs, -1)", [L + "zero_overlap_is_the_floor_with_zero_gradient"], 7),
    ("nla_as_log_of_a_sum", LOSSES, "return _neg_log_sum(torch.minimum(wide(logp), wide(logq)))", "return -alpha(logp, logq).clamp(min=torch.finfo(torch.float32).tiny).log()", [L + "overlap_below_float32_still_teaches"], "no gradient where overlap is smallest"),
    ("lk_differentiates_its_weight", LOSSES, "(1 - distance if alpha is None else alpha).detach())", "(1 - distance if alpha is None else alpha))", [L + "gradient_is_the_closed_form[lk]"], "the blend's weight is trained too"),
    ("tvpp_without_its_baseline", LOSSES, "(_at(inside, x).to(mu) - mu) / sigma", "_at(inside, x).to(mu) / sigma", [L + "gradient_is_the_closed_form[tvpp]"], "a biased score function"),
    ("losses_in_half_precision", LOSSES, "return torch.minimum(wide(logp), wide(logq)).exp().sum(-1)", "return torch.minimum(logp, logq).exp().sum(-1)", [L + "edges_are_finite[tv-dtype1]"], "sums over the vocabulary in bfloat16"),
    ("rows_temperature_on_the_target_alone", ROWS, "logq = log_law(self.head_q(ours), self.temperature[i])", "logq = log_law(self.head_q(ours), 0 * self.temperature[i])", [R + "equals_the_plain_form[kl-4-False]"], 10),
    ("rows_report_an_uncut_draft", ROWS, "alpha = losses.alpha(logp, self.served(logq, i))", "alpha = losses.alpha(logp, logq)", [R + "truncation_cuts_p_in_the_loss_and_both_in_the_report"], 10),
    ("rows_keep_every_law", ROWS, "return [checkpoint(part, i, use_reentrant=False, preserve_rng_state=False) for i in chunks]", "return [part(i) for i in chunks]", [R + "no_law_outlives_its_chunk"], "memory of whole laws"),
    ("rows_train_the_target", ROWS, "        with torch.no_grad():\n            theirs", "        with torch.enable_grad():\n            theirs", [R + "only_the_draft_learns"], "gradients flow into the target"),
    ("length_counts_tokens_past_the_end", "cotrain/acceptance.py", "return -(reach * inside).sum((1, 2)) / end.clamp(min=1)", "return -reach.sum((1, 2)) / end.clamp(min=1)", [A + "sequence_losses_by_hand"], 21),
    ("kept_mass_spread_evenly", "cotrain/likeliest.py", "torch.where(total.isfinite(), others - total, -math.inf)", "torch.where(others.isfinite(), torch.zeros_like(others), -math.inf).log_softmax(-1)", ["tests/test_likeliest.py::test_losses_are_those_of_merged_laws_in_value_and_gradient"], "a loss that is of no laws"),
    ("kept_mass_left_out", "cotrain/likeliest.py", " + law[..., -1:].to(logq)", " - math.inf", ["tests/test_likeliest.py::test_completed_laws_are_laws"], "a law that does not sum to 1"),
    ("kept_laws_of_temperature_1", "cotrain/likeliest.py", "torch.full((len(states),), self.temperature, device", "torch.full((len(states),), 1.0, device", ["tests/test_likeliest.py::test_what_is_read_are_the_laws_as_served"], "the draft learns another regime"),
    ("kept_laws_not_truncated", "cotrain/likeliest.py", "served(log_law(self.head(states), t), t, self.truncate)", "log_law(self.head(states), t)", ["tests/test_likeliest.py::test_what_is_read_are_the_laws_as_served"], "the draft learns another regime"),
    ("nothing_outside_is_nan", "cotrain/likeliest.py", "torch.where(total.isfinite(), others - total, -math.inf)", "(others - total)", ["tests/test_likeliest.py::test_completed_laws_are_laws"], "a pruned draft learns NaN"),
    ("laws_of_another_regime_are_read", "cotrain/job.py", '{"laws": f"top {top} of {regime(sampling(self.cfg.regime))}"}', '{}', ["tests/test_likeliest.py::test_runs_share_laws_on_disk_of_one_regime"], "a cache of top-4 laws passes for one of top-8"),
    ("merged_losses_are_refused_late", "cotrain/assembly.py", "        refuse_merged(taught, cfg.init.cosine)\n", "        pass\n", ["tests/test_likeliest.py::test_runs_share_laws_on_disk_of_one_regime"], "a loss that kept laws lack is refused when the texts are sampled"),
    ("merged_losses_are_not_asked_for", "cotrain/module.py", "            refuse_merged(stages, cosine)\n", "", ["tests/test_likeliest.py::test_what_merged_laws_do_not_have_is_refused"], "a loss that kept laws do not have is computed all the same"),
    ("kept_mass_by_difference", "cotrain/likeliest.py", "rest = logp.scatter(-1, top.indices, -math.inf).logsumexp(-1, keepdim=True)", "rest = (1 - top.values.float().exp().sum(-1, keepdim=True)).clamp(min=0).log()", ["tests/test_likeliest.py::test_a_mass_outside_that_float32_cannot_tell_from_none_is_kept"], "reverse KL ends with an error on text that is nearly sure"),
]
