"""Planted bugs of states of layers and of passes over trees."""

# fmt: off
ROWS_OF_BUGS = [
    ('siblings_see_each_other', 'inference/models/cache.py', 'branches = Branches(anchor, slots, seen[:, first:], depths)', 'branches = Branches(anchor, slots, (2 << slots - anchor) - 1, depths)', ['tests/test_branches.py::test_in_few_operations_and_in_transformers_own_forward[static]'], 23),
    ('nodes_at_the_positions_of_their_slots', 'inference/models/cache.py', 'anchor + depths[:, first:], None', 'slots, None', ['tests/test_branches.py::test_in_few_operations_and_in_transformers_own_forward[static]'], 14),
    ('paths_stay_where_they_are', 'inference/models/cache.py', 'torch.where(path < 0, 0, order)', '(path + 1).clamp(min=0)', ['tests/test_branches.py::test_in_few_operations_and_in_transformers_own_forward[static]'], 'an accepted path is read with the refused nodes between'),
    ('levels_start_at_the_anchor', 'inference/models/cache.py', 'tree.nodes + 1 - n\n', '0 * n\n', ['tests/test_branches.py::test_level_by_level_is_the_same_pass'], 'a level of a tree is written over the anchor'),
    ('ancestors_of_two_steps', 'inference/models/passes.py', 'range((up.shape[1] - 1).bit_length())', 'range(2)', ['tests/test_branches.py::test_depths_and_ancestors_are_those_of_the_parents'], 'deep nodes do not see the whole of their path'),
    ('moves_that_are_recorded_are_made', 'inference/models/cuda_graphs.py', 'torch.full_like(path, -1)', 'path', ['tests/test_branches.py::test_replayed_trees_are_few_launches'], 33),
    ('windows_count_slots', 'inference/models/forward.py', 'held.unsqueeze(1), width', 'slots, width', ['tests/test_branches.py::test_families_with_and_without_windows[Mistral1]'], 19),
    ('compiled_nodes_at_their_positions', 'inference/models/step.py', 'index_put_((row, written), new', 'index_put_((row, positions), new', ['tests/test_branches.py::test_by_bucket[static]'], 'siblings are written at one slot'),
    ('biases_by_slots_accepted', 'inference/models/probe.py', 'if biased_by_slots(self.model.config):', 'if False:', ['tests/test_branches.py::test_families_with_and_without_windows[Mpt]'], 'biases that count slots: in half precision no check of logits sees them'),
    ('trees_unchecked', 'inference/models/selfcheck.py', 'self._check("trees", Probe.trees)', 'pass', ['tests/test_branches.py::test_families_with_and_without_windows[Mpt]'], 39),
    ('states_one_layer_early', 'inference/models/taps.py', 'return blocks[layer].register', 'return blocks[max(layer - 1, 0)].register', ['tests/test_states.py::test_states_are_transformers_own[Llama]'], 'a draft reads another layer than it was trained on'),
    ('states_one_layer_late_in_few_operations', 'inference/models/llama.py', '            found[i] = x\n', '            found[i] = x + 0.01 * i\n', ['tests/test_states.py::test_states_in_few_operations_are_transformers_own'], "states of few operations are not the model's"),
    ('early_exit_runs_on', 'inference/models/llama.py', 'weights.layers if stored else weights.layers[:needed]', 'weights.layers', ['tests/test_states.py::test_states_in_few_operations_are_transformers_own'], 'an early exit that costs and stores a whole pass'),
    ('states_of_the_last_chunk', 'inference/models/prefill.py', 'for part in parts], 1)', 'for part in parts[:1] + parts[-1:]], 1)', ['tests/test_states.py::test_states_in_few_operations_are_transformers_own'], 'a long prompt leaves the states of its last chunk alone'),
    ('hooks_that_stay', 'inference/models/taps.py', '            handle.remove()\n', '            pass\n', ['tests/test_states.py::test_states_are_transformers_own[Llama]'], 'a model is left with hooks, which the next engine runs around'),
    ('states_unchecked', 'inference/models/selfcheck.py', 'self._check("states", Probe.states)', 'pass', ['tests/test_states.py::test_states_that_are_not_the_models_own_are_refused'], 39),
    ('replayed_states_in_another_order', 'inference/models/cuda_graphs.py', 'dict(zip(layers, found[1:], strict=True))', 'dict(zip(layers, found[:0:-1], strict=True))', ['tests/test_states.py::test_replayed_states_are_transformers_own'], 'layers are mixed up where passes are replayed'),
]
