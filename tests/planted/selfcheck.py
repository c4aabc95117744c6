"""Planted bugs in the check of a model's logits and in what is kept of its weights."""

# fmt: off
ROWS_OF_BUGS = [
    ('values_not_in_the_key', 'inference/models/forward.py', '    return llama_weights.origin(model), fingerprint(model)', '    return llama_weights.origin(model), b""', ['tests/test_stale.py::test_a_new_engine_has_the_new_weights[False-copied]'], 38),
    ('compiled_of_old_values', 'inference/models/compiled.py', 'if step is None or origin != self.origin:', 'if step is None or origin[0] != self.origin[0]:', ['tests/test_stale.py::test_what_was_compiled_of_other_values_is_not_used'], 38),
    ('checksum_of_columns_alone', 'inference/models/checksum.py', 'return [square.sum(0), square.sum(1), ', 'return [square.sum(0), square.sum(0), ', ['tests/test_stale.py::test_values_that_change_places_are_seen'], 38),
    ('checksum_without_the_rest', 'inference/models/checksum.py', 'square.sum(1), whole[used * WORD :].to(torch.int64)]', 'square.sum(1)]', ['tests/test_stale.py::test_every_change_of_one_element_is_seen'], 38),
    ('a_part_of_another_class_bypassed', 'inference/models/llama_weights.py', 'return ours and all(name.startswith("torch.nn.modules.") for name in homes)', 'return ours', ['tests/test_selfcheck.py::test_a_part_of_another_class_is_not_bypassed'], 39),
    ('a_subclass_bypassed', 'inference/models/llama_weights.py', 'return ours and all(name.startswith("torch.nn.modules.") for name in homes)', 'return type(model).__name__ in FAMILIES', ['tests/test_selfcheck.py::test_a_subclass_with_a_forward_of_its_own_is_not_bypassed'], 39),
    ('lean_not_checked', 'inference/models/lm.py', 'applies(self.model) and lean_agrees(self.model, self.context)', 'applies(self.model)', ['tests/test_selfcheck.py::test_what_disagrees_runs_through_transformers'], 39),
    ('noise_without_a_bound', 'inference/models/probe.py', 'min(MOST, max(COARSE, FACTOR * float(noise.max())))', 'max(COARSE, FACTOR * float(noise.max()))', ['tests/test_selfcheck.py::test_the_noise_that_excuses_is_bounded'], 35),
    ('loud_places_decide', 'inference/models/probe.py', '2 * quiet.sum() > len(quiet)', 'False', ['tests/test_selfcheck.py::test_places_that_rounding_moves_far_say_nothing'], 'a right forward in bfloat16 is refused for one place that amplifies rounding: slower, and without 8 bits'),
    ('loud_places_are_all_excused', 'inference/models/probe.py', '2 * quiet.sum() > len(quiet)', 'quiet.any()', ['tests/test_selfcheck.py::test_places_that_rounding_moves_far_say_nothing'], 'one place decides for a model whose places are all loud'),
    ('eight_bits_of_what_disagrees', 'inference/models/lm.py', 'return can_round(model) and lean_agrees(model, positions_of(model.config.get_text_config()))', 'return can_round(model)', ['tests/test_selfcheck.py::test_8_bits_are_not_asked_of_what_disagrees'], 'a run ends where its draft in 8 bits cannot be run'),
    ('the_second_pass_unchecked', 'inference/models/probe.py', 'return [torch.cat((parts[0][b, :start], parts[1][b])) for', 'return [parts[0][b, :start] for', ['tests/test_selfcheck.py::test_wrong_forwards_are_caught_and_right_ones_pass'], 39),
    ('the_check_is_kept_for_other_weights', 'inference/models/selfcheck.py', 'key = (asked, _setting(model), fingerprint(model))', 'key = (asked, _setting(model))', ['tests/test_selfcheck.py::test_it_is_done_once_for_weights_that_stay'], 39),
    ('the_narrow_window_stays', 'inference/models/selfcheck.py', '            setattr(config, key, width)\n', '            pass\n', ['tests/test_selfcheck.py::test_the_config_is_as_it_was'], "a model's config is changed by looking at it"),
    ('one_length_for_all_rows', 'inference/models/probe.py', 'cache.claimed = self.context - self.starts[1]', 'cache.claimed = 0', ['tests/test_selfcheck.py::test_one_length_for_all_rows_is_refused'], 14),
    ('windows_elsewhere_accepted', 'inference/models/selfcheck.py', 'if found.agrees and form == "one" and shrunk and sliding_window(config):', 'if False:', ['tests/test_selfcheck.py::test_a_window_that_the_config_does_not_rule_is_refused'], 19),
]
