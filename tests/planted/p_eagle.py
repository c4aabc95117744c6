"""Planted bugs of feature drafts that guess in one pass."""

# fmt: off
HAND = 'tests/test_p_eagle.py::test_guesses_are_those_of_rounds_by_hand[None]'
SERVED = 'tests/test_students.py::test_the_law_that_learns_is_the_law_that_is_served[p_eagle]'
READ = 'tests/test_p_eagle_export.py::test_vllm_reads_what_was_trained'
ROWS_OF_BUGS = [
    ('a_mask_in_place_of_the_newest_state', 'inference/proposers/p_eagle.py', 'text = columns <= only.unsqueeze(1)', 'text = columns < only.unsqueeze(1)', [SERVED], 'position 1 reads the learnt state where the target left its own'),
    ('masks_of_a_round_a_place_late', 'inference/proposers/p_eagle.py', 'pairs.unsqueeze(1) + columns, None', 'pairs.unsqueeze(1) + columns + (~text).long(), None', [SERVED], 'positions of masks off by one when served'),
    ('masks_are_read_as_the_next_token', 'inference/proposers/p_eagle.py', 'masked_fill(~text, self.mask)', 'masked_fill(~text, 0)', [SERVED], 'another embedding than was trained'),
    ('a_mask_is_decayed', 'inference/proposers/p_eagle_network.py', 'torch.randn(self.fc.in_features)', 'torch.randn(1, self.fc.in_features)', ['tests/test_p_eagle.py::test_its_mask_is_a_vector_that_is_neither_rounded_nor_decayed'], 'a mask that shrinks, and a draft that is not trained for 8 bits'),
    ('more_drafts_than_masks_were_trained', 'inference/proposers/eagle.py', 'most = self.depths or max(turn.k)', 'most = max(turn.k)', ['tests/test_p_eagle.py::test_no_more_is_drafted_than_was_learnt'], 'masks at depths that never learnt'),
    ('masks_learn_a_place_early', 'cotrain/students/p_eagle.py', 'rounds.positions[:, masks.start] + masks.depth]', 'rounds.positions[:, masks.start] + masks.depth - 1]', [HAND], 'positions of masks off by one in training'),
    ('masks_guess_the_anchor_too', 'cotrain/students/mask_blocks.py', 'place = masks.place[column] + ahead', 'place = masks.place[column]', [HAND], 'depth j learns the law of depth j - 1'),
    ('a_p_eagle_mask_sees_masks_of_other_rounds', 'cotrain/students/mask_blocks.py', '(masks.start.unsqueeze(1) == masks.start) & (', '(', [HAND], 'what learns is not what is served'),
    ('pairs_of_packed_texts_see_each_other', 'cotrain/students/p_eagle.py', 'visible(masks, length - 1, rounds.text[:, :-1])', 'visible(masks, length - 1)', ['tests/test_p_eagle.py::test_packed_texts_are_as_if_alone'], '44: packed texts are read as one'),
    ('rounds_begin_a_token_late', 'cotrain/students/mask_blocks.py', 'batch["predicted"][:, ahead:].any(0)', 'batch["predicted"].any(0)', ['tests/test_p_eagle.py::test_masks_stand_behind_anchors_whose_next_token_is_learnt'], 'the first round of a completion learns no later depths'),
    ('dropped_rounds_count_for_nothing', 'cotrain/students/p_eagle.py', 'share=1.0 if u is None else KEEP**depth', 'share=1.0', ['tests/test_p_eagle.py::test_dropped_starts_are_made_up_for[kl]'], 'later depths learn the less, the more is dropped'),
    ('a_folder_without_its_mask', 'inference/proposers/p_eagle_network.py', '    config_class: Any = PEagleConfig\n', '    config_class: Any = PEagleConfig\n    _keys_to_ignore_on_save = ["mask_hidden"]\n', [READ + '[eagle3-None]'], 'vLLM refuses a folder without mask_hidden'),
    ('speculators_without_mask_hidden', 'cotrain/export/eagle3.py', 'for name, tensor in tensors.items()}', 'for name, tensor in tensors.items() if name != "mask_hidden"}', [READ + '[speculators-16]'], 'vLLM refuses a folder without mask_hidden'),
    ('speculators_of_eagle3', 'cotrain/export/eagle3.py', 'algorithm = "eagle3" if mask is None else "peagle"', 'algorithm = "eagle3"', [READ + '[speculators-None]'], 'vLLM would draft a token a pass'),
    ('p_eagle_served_token_by_token', 'cotrain/export/engines.py', 'partial(_vllm_features, parallel=True) if parallel else', 'partial(_vllm_features, parallel=False) if parallel else', ['tests/test_p_eagle_export.py::test_the_command_tells_vllm_to_draft_in_parallel_and_no_other_engine_gets_one'], 'vLLM would skip mask_hidden'),
    ('p_eagle_for_engines_that_have_none', 'cotrain/export/engines.py', 'PARALLEL = ("parallel", "p_eagle")', 'PARALLEL = ("parallel",)', ['tests/test_p_eagle_export.py::test_the_command_tells_vllm_to_draft_in_parallel_and_no_other_engine_gets_one'], 'a folder that an engine reads as another kind'),
    ('p_eagle_exported_beyond_its_depths', 'cotrain/export/eagle3.py', 'if found.kind in PARALLEL and metadata.k >', 'if metadata.k < 0 and metadata.k >', ['tests/test_p_eagle_export.py::test_what_cannot_be_exported_is_refused'], 'masks at depths that never learnt'),
]
