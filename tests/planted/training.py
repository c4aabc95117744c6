"""Planted bugs of corpora, rollouts, distillation and its callbacks."""

# fmt: off
ROWS_OF_BUGS = [
    ('split_by_text', 'cotrain/corpora.py', 'return _hash(self.path) % 100', 'return _hash(self.text) % 100', ['tests/test_data.py::test_the_split_of_a_path_never_changes'], 'another release of a file moves it from held-out to train'),
    ('order_forgets_epochs', 'cotrain/data.py', 'epoch, skip = divmod(self.start, self.size)', 'epoch, skip = 0, self.start % self.size', ['tests/test_data.py::test_an_order_resumes_anywhere[8]'], "a resumed run sees the first epoch's order again"),
    ('curriculum_restarts', 'cotrain/sets.py', 'SeededOrder(self.sizes[1], self.seed + 1, max(self.start - self.first, 0))', 'SeededOrder(self.sizes[1], self.seed + 1, 0)', ['tests/test_data.py::test_a_curriculum_resumes_anywhere[11]'], 'a resumed run sees the first rollouts again'),
    ('acceptance_off_by_one', 'cotrain/evaluate.py', '_aligned(torch.cat(ratios), first - 1)', '_aligned(torch.cat(ratios), first)', ['tests/test_module.py::test_figures_are_those_of_passes_made_by_hand'], 'ratios belong to the next token: predicted tau is of another text'),
    ('stage_too_long', 'cotrain/module.py', 'if progress < stage.until)', 'if progress <= stage.until)', ['tests/test_module.py::test_stages_follow_one_another'], 'the loss switches a step late'),
    ('prompt_counts', 'cotrain/rollouts.py', '(after >= self.prompt.unsqueeze(1))', '(after >= 0)', ['tests/test_rollout.py::test_a_set_is_read_as_it_was_saved'], 'prompt tokens, which the target did not sample, count as sampled'),
    ('resumed_noise', 'cotrain/rollout.py', 'keys = list(range(start, start + len(batch)))', 'keys = list(range(len(batch)))', ['tests/test_rollout.py::test_an_interrupted_collection_goes_on_as_if_it_had_not_been'], 26),
    ('rollouts_of_another_target', 'cotrain/sets.py', 'found is not None and self._manifest(kind, sampling).items() <= found.items()', 'found is not None', ['tests/test_rollout.py::test_a_set_of_other_making_is_not_used[target]'], "a draft learns from, and is judged on, another target's texts"),
    ('rollouts_mixed', 'cotrain/sets.py', 'f"{_digest(made)}.partial.jsonl"', '"partial.jsonl"', ['tests/test_rollout.py::test_what_was_begun_with_other_settings_is_not_mixed_in'], 'an interrupted set is finished with other settings'),
    ('fingerprint_of_embeddings', 'cotrain/teacher.py', 'for tensor in model.state_dict().values():', 'for tensor in [model.get_input_embeddings().weight]:', ['tests/test_draft.py::test_a_fingerprint_knows_every_tensor_and_the_quantisation'], 'a fine-tune of the layers passes for the model it came from'),
    ('random_target', 'cotrain/teacher.py', 'if info["missing_keys"]:', 'if False:', ['tests/test_draft.py::test_weights_that_are_missing_are_refused'], 'missing weights of the target are random numbers'),
    ('quantised_codes_as_weights', 'cotrain/draft.py', 'if kind in ("Params4bit", "Int8Params"):', 'if kind == "Params4bit":', ['tests/test_draft.py::test_layers_of_a_quantised_target_are_plain_numbers[int8]'], 'a draft cut from an int8 target starts from its integer codes'),
    ('wrong_layers', 'cotrain/draft.py', 'str(chosen[int(parts[at])])', 'parts[at]', ['tests/test_draft.py::test_the_chosen_layers_are_copied_in_their_order'], 'the first layers are copied whatever was chosen'),
    ('muon_forgets', 'cotrain/optim.py', '            part.load_state_dict(state)\n', '            pass\n', ['tests/test_module.py::test_muon_moves_every_parameter_and_resumes_exactly'], 'a resumed leg starts with empty moments'),
    ('checkpoint_before_validation', 'cotrain/train.py', 'every_n_epochs=1, save_on_train_epoch_end=False,', 'every_n_train_steps=every,', ['tests/test_train.py::test_an_interrupted_run_ends_as_if_it_had_not_been'], 'a checkpoint lacks the figures of its own step: once resumed, it is never exported'),
    ('last_step_unmeasured', 'cotrain/train.py', 'if trainer.global_step % every:', 'if False:', ['tests/test_train.py::test_the_report_is_whole'], 'the last weights are no candidate'),
]
