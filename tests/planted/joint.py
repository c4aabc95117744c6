"""Planted bugs of joint training."""

# fmt: off
ROWS_OF_BUGS = [
    ('scale_chosen_on_the_texts_that_certify', 'cotrain/training/joint.py', 'write_certified', 'module.head_target, choosing,', 'module.head_target, judging,', ['tests/cotrain/training/test_joint.py::test_texts_that_choose_the_scale_do_not_certify'], 'the certificate is of the texts that it was fitted to'),
    ('own_texts_of_the_original', 'cotrain/training/joint.py', 'write_certified', 'sampled_again(again, moved,', 'sampled_again(again, original,', ['tests/cotrain/training/test_joint.py::test_the_kl_is_that_between_the_folders_on_every_second_text'], 'the certificate is not for texts of the served model'),
    ('each_bound_with_the_whole_risk', 'cotrain/training/joint.py', '_about', ' / len(parts)', '', ['tests/cotrain/training/test_joint.py::test_both_bounds_hold_together'], 'two bounds fail together more often than they say'),
    ('certified_by_its_mean', 'cotrain/training/joint.py', '_about', 'one["bound"] <=', 'one["kl"] <=', ['tests/cotrain/training/test_joint.py::test_both_bounds_hold_together'], 'the certificate has no confidence'),
    ('shared_texts_of_the_moved_target', 'cotrain/training/joint.py', 'serving', 'last.rollout.folder, last.trainer.cache = None, None', 'last.trainer.cache = None', ['tests/cotrain/training/test_joint.py::test_shared_folders_are_the_originals'], 'runs that share texts find those of a target that moved'),
    ('texts_sampled_in_the_name_of_the_original', 'cotrain/training/joint.py', 'original_texts', ', by=partial(_refuse_sampling, place)', '', ['tests/cotrain/training/test_joint.py::test_missing_texts_of_the_original_are_not_sampled_from_the_moved_target'], 'a manifest names another target than the one that sampled'),
    ('detached_steps_that_do_not_move', 'cotrain/training/joint.py', 'JointTraining.detached', 'self.global_step // self.settings.every', 'self.global_step', ['tests/cotrain/training/test_joint.py::test_detached_steps_are_counted_among_those_that_move'], 'joint.detach has no effect with joint.every=2'),
    ('original_read_with_its_adapter', 'cotrain/training/joint.py', 'unadapted', 'with without_adapter(target):', 'if True:', ['tests/cotrain/training/test_joint.py::test_the_kl_is_that_between_the_models'], 'the KL to the original is 0'),
    ('kl_of_prompts_too', 'cotrain/training/joint.py', 'JointTraining._kl', 'pad(batch["predicted"], (0, 1))', 'torch.ones_like(batch["ids"]).bool()', ['tests/cotrain/training/test_joint.py::test_the_kl_is_that_between_the_models'], 'the bound counts tokens that are not served'),
    ('texts_count_alike', 'cotrain/evaluation/moved.py', 'upper_bound', 'return float(sums.sum() / counts.sum() + quantile', 'return float((sums / counts).mean() + quantile', ['tests/cotrain/evaluation/test_moved.py::test_the_bound_is_of_the_mean_over_tokens'], 'the bound is of another mean than the KL per token'),
    ('skewness_lowers_the_bound', 'cotrain/evaluation/moved.py', 'upper_bound', 'skewed.clamp(min=0)', 'skewed', ['tests/cotrain/evaluation/test_moved.py::test_a_negative_skewness_does_not_lower_the_bound'], 'the bound of texts that are skewed to the left covers less than it says'),
]
