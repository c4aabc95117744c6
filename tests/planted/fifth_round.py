"""Survivors of a fifth round of planted bugs."""

# fmt: off
ROWS_OF_BUGS = [
    ('prompts_of_a_file_stripped', 'cotrain/commands/generate.py', 'lines = [line for line in lines if line.strip()]', 'lines = [line.strip() for line in lines if line.strip()]', ['tests/test_fifth_round.py::test_prompts_of_a_file_keep_their_spaces'], 'another prompt is continued than was given, code above all'),
    ('nucleus_before_top_k_in_training', 'cotrain/config/regimes.py', 'lambda logits: cuts[1](cuts[0](logits))', 'lambda logits: cuts[0](cuts[1](logits))', ['tests/test_fifth_round.py::test_training_cuts_laws_as_the_engine_does'], 'laws that are learnt and judged are wider than those served'),
    ('parts_without_their_depths_shares', 'cotrain/training/step_loss.py', 'terms.append(part * found.terms)', 'terms.append(found.terms)', ['tests/test_fifth_round.py::test_parts_of_a_loss_are_weighed_as_the_loss_is'], 'loss_ce and loss_tv are several times too large and do not add up'),
    ('settings_of_the_row_before', 'inference/batched/batch.py', 'all(a is b for a, b in zip(rows, self.rows, strict=True))', 'all(a.id == b.id for a, b in zip(rows, self.rows, strict=True))', ['tests/test_fifth_round.py::test_rows_of_one_noise_keep_their_own_settings'], 'a request of the same id is decoded with the settings of the one before it'),
    ('baseline_cut_to_fifty', 'inference/measure/arms.py', '            sampling.top_k,\n            float(sampling.top_p),', '            sampling.top_k or None,\n            float(sampling.top_p),', ['tests/test_fifth_round.py::test_transformers_samples_from_the_whole_law'], "the baseline samples from transformers' default cut"),
]
