"""Planted bugs of feature drafts."""

# fmt: off
SERVED = 'tests/test_students.py::test_the_law_that_learns_is_the_law_that_is_served[eagle]'
ROWS_OF_BUGS = [
    ('own_features_of_the_next_pair', 'inference/proposers/eagle.py', 'anchor.unsqueeze(1) + nodes.depth, None', 'anchor.unsqueeze(1) + 1, None', [SERVED], 'every draft of a round stands at the place of the first'),
    ('features_of_the_token_itself', 'inference/proposers/eagle.py', 'tails = [text[-one:] if one else text for', 'tails = [text[-one - 1 : -1] or text if one else text for', [SERVED], 'features are beside the embedding of their own token'),
    ('accepted_tokens_keep_own_features', 'inference/proposers/eagle.py', 'self.waiting = [max(valid - stored, 0) for', 'self.waiting = [min(valid - stored, 1) for', ['tests/test_eagle.py::test_rounds_without_drafts_lose_no_features'], 'features of rounds without drafts are written over each other'),
    ('features_of_the_row_that_left', 'inference/proposers/eagle.py', '        self.features[target] = self.features[source]\n', '', ['tests/test_proposers.py::test_rows_are_as_if_alone[eagle]'], '14: a row goes on with what another one was'),
    ('a_prompt_begins_a_pair_late', 'inference/proposers/eagle.py', 'last = torch.tensor([max(len(prompt) - 2, 0)', 'last = torch.tensor([max(len(prompt) - 3, 0)', [SERVED], 'the first draft after a prompt lacks its newest features'),
    ('states_that_are_no_numbers_are_kept', 'inference/proposers/eagle.py', 'return self.network.features(states).nan_to_num(0.0, 0.0, 0.0)', 'return self.network.features(states)', ['tests/test_eagle.py::test_states_that_are_no_numbers_leave_nothing_behind'], '41: the next row of a slot attends to NaN'),
    ('rounds_see_pairs_that_come', 'cotrain/students/eagle.py', '& (every[:, None, :-1] <= every[:, :-1, None])', '& (every[:, None, :-1] <= every[:, :-1, None] + 1)', [SERVED], '44: a draft learns from features that no round has'),
    ('texts_see_each_other', 'cotrain/students/eagle.py', 'self.sees = (of.unsqueeze(2) == of.unsqueeze(1)) &', 'self.sees =', ['tests/test_eagle.py::test_packed_texts_are_as_if_alone'], '44: packed texts are read as one'),
    ('own_pairs_are_not_read', 'cotrain/students/eagle.py', 'return sum((w * v for w, (_, v) in zip(each, own, strict=True)), theirs @ values)', 'return theirs @ values', [SERVED], 'training forgets the drafts before, serving does not'),
    ('unknown_tokens_have_mass', 'inference/proposers/eagle_network.py', 'size), -torch.inf).index_copy', 'size), 0.0).index_copy', ['tests/test_eagle.py::test_it_knows_the_tokens_that_are_most'], 'a pruned draft drafts what its head has no row for'),
    ('the_draft_counts_its_own_ids', 'inference/proposers/eagle_network.py', 'self.d2t.copy_(chosen - torch.arange(len(chosen), device=chosen.device))', 'self.d2t.copy_(chosen)', ['tests/test_eagle.py::test_it_knows_the_tokens_that_are_most'], 'EAGLE-3 format: d2t is a difference, engines add it'),
    ('an_export_keeps_our_names', 'cotrain/export/eagle3.py', 'name.replace("midlayer.", "layers.0.")', 'name', ['tests/test_eagle_export.py::test_the_format_of_speculators'], 'speculators does not find the layer'),
]
