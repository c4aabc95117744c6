"""Planted bugs of sequence losses on conversations, accumulation, schedules, signals and what a target teaches."""

S, P, T = "tests/test_sequence_training.py::test_", "tests/test_schedule.py::test_", "tests/test_taught.py::test_"

# fmt: off
ROWS_OF_BUGS = [
    ('completions_from_column_0', 'cotrain/completions.py', 'start = sampled.int().argmax(1, keepdim=True)', 'start = sampled.int().argmax(1, keepdim=True) * 0', [S + 'calls_are_those_of_the_completion_alone'], 43),
    ('calls_of_prompts', 'cotrain/sets.py', 'sampled=texts.predicted[kept])', 'sampled=predicted[kept])', [S + 'calls_are_those_of_the_completion_alone'], 43),
    ('weights_of_calls_misplaced', 'cotrain/completions.py', 'masked_scatter(sampled, values[inside])', 'masked_scatter(sampled, values.flatten())', [S + 'positions_weigh_the_calls_that_they_save'], 43),
    ('no_number_goes_on', 'cotrain/module.py', 'if not bool(torch.isfinite(loss.detach())):', 'if False:', [S + 'a_loss_that_is_no_number_names_step_and_texts'], 'weights become NaN in silence'),
    ('means_of_means', 'cotrain/counts.py', 'torch.stack([counted(batch) for batch in group]).sum(0)', 'counted(group[0]) * len(group)', [S + 'two_ragged_batches_are_the_large_one'], 47),
    ('a_step_counts_its_batch', 'cotrain/module.py', 'total = batch["counts"] if number > 1 else counted(batch)', 'total = counted(batch) * number', [S + 'two_ragged_batches_are_the_large_one'], 47),
    ('the_cosine_stays', 'cotrain/module.py', 'return weight * max(0.0, 1 - done / stages[0].until)', 'return weight * max(1.0, 1 - done / stages[0].until)', [S + 'the_cosine_falls_to_nothing_where_the_losses_switch'], 'a second loss beside the named one'),
    ('a_part_is_not_logged', 'cotrain/module.py', 'for name, part in found.items()}, batch, watched)', 'for name, part in found.items() if name != "cosine"}, batch, watched)', [S + 'the_parts_that_are_logged_add_up'], 48),
    ('decay_in_steps', 'cotrain/progress.py', 'fall = (1 - done) / decay', 'fall = (1 - done) * progress.steps / 1150', [P + 'warm_up_and_decay_are_fractions_of_any_length'], 'a short run never reaches its rate'),
    ('a_budget_without_a_schedule', 'cotrain/progress.py', 'return min(max(step / max(self.steps, 1), spent), 1.0)', 'return min(step / max(self.steps, 1), 1.0)', [P + 'a_budget_of_time_ends_the_schedule_with_it'], 'time ends a training at its full rate'),
    ('a_rate_is_free', 'cotrain/resume.py', 'MEASURED = "bench."', 'MEASURED = ("bench.", "optimizer.")', [P + 'only_what_changes_weights_makes_another_run'], 'a run goes on with another loss in silence'),
    ('a_shorter_run_is_longer', 'cotrain/resume.py', 'new is None or new > old', 'new is None or new != old', [P + 'only_what_changes_weights_makes_another_run'], 'a run of more steps passes for one of fewer'),
    ('checkpoints_between_batches', 'cotrain/interrupts.py', 'if index + 1 < number or _validates(trainer):', 'if _validates(trainer):', [P + 'checkpoints_are_kept_by_time_but_where_a_validation_keeps_one'], 'half a step is lost'),
    ('a_checkpoint_skips_its_validation', 'cotrain/interrupts.py', 'if index + 1 < number or _validates(trainer):', 'if index + 1 < number:', [P + 'checkpoints_are_kept_by_time_but_where_a_validation_keeps_one'], 'a resumed run lacks a candidate'),
    ('a_second_signal_waits', 'cotrain/interrupts.py', 'os._exit(128 + number)', 'return', [P + 'a_second_signal_ends_at_once'], 49),
    ('a_signal_keeps_nothing', 'cotrain/interrupts.py', 'trainer.save_checkpoint(self.path)', 'pass', [P + 'checkpoints_are_kept_by_time_but_where_a_validation_keeps_one'], 49),
    ('padded_rows_are_taught', 'cotrain/teacher.py', 'return out[..., :vocabulary]', 'return out', [T + 'padded_rows_have_no_mass_and_learn_nothing'], 22),
    ('taught_in_the_drafts_numbers', 'cotrain/teacher.py', 'enabled=False)', 'enabled=True)', [T + 'a_target_teaches_in_its_own_numbers'], 'a float32 target teaches in bfloat16'),
    ('shares_of_ones_own', 'cotrain/assembly.py', 'shares = cfg.data.shares if cfg.data.path else', 'shares =', [T + 'shares_of_embedded_domains_do_not_touch_ones_own'], "nine tenths of a user's texts are left out"),
    ('left_out_in_silence', 'cotrain/job.py', 'print(found.left_out(self.cfg.rollout.prompt_tokens, split), end="")', 'pass', [T + 'prompts_that_are_left_out_are_counted'], 'prompts are dropped and nobody knows'),
    ('unknown_rounding_passes', 'cotrain/bits.py', 'weight.ndim > 1 and id(weight) not in known]', 'weight.ndim > 2 and id(weight) not in known]', [T + 'rounding_that_is_not_known_is_refused'], 'a draft that is not rounded is said to be'),
]
