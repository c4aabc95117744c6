"""Planted bugs of heads on the target's newest state, Medusa's among them."""

# fmt: off
ROWS_OF_BUGS = [
    ('newest_state_of_another_token', 'inference/proposers/newest_state.py', 'outcome.states[LAST][rows, outcome.accepted]', 'outcome.states[LAST][rows, 0 * outcome.accepted]', ['tests/test_students.py::test_the_law_that_learns_is_the_law_that_is_served[medusa]'], 'after accepted drafts heads go on from the state of the anchor before them'),
    ('first_state_of_the_prompts_beginning', 'inference/proposers/newest_state.py', 'states[LAST][row, len(prompt) - 2] if', 'states[LAST][row, 0] if', ['tests/test_students.py::test_the_law_that_learns_is_the_law_that_is_served[medusa]'], 'the first round drafts from the state of the first token'),
    ('waiting_rows_enter_without_their_state', 'inference/proposers/newest_state.py', '        self.newest[target] = self.newest[source]\n        self.blank.append', '        self.blank.append', ['tests/test_proposers.py::test_rows_are_as_if_alone[medusa]'], 26),
    ('states_stay_where_rows_were', 'inference/proposers/newest_state.py', 'self.newest[target], self.blank[target] = self.newest[source], self.blank[source]', 'self.blank[target] = self.blank[source]', ['tests/test_proposers.py::test_rows_are_as_if_alone[medusa]'], 26),
    ('every_depth_by_the_first_head', 'inference/proposers/medusa.py', 'return logits[:, 0], of_depths(logits)', 'return logits[:, 0], of_depths(logits[:, :1].expand_as(logits))', ['tests/test_students.py::test_the_law_that_learns_is_the_law_that_is_served[medusa]'], 'what head j learnt is never served'),
    ('rounds_go_on_into_the_next_text', 'cotrain/students/medusa.py', 'inside = self.positions[:, ahead:] == self.positions[:, :-ahead] + ahead', 'inside = self.positions[:, ahead:] >= 0', ['tests/test_heads_of_state.py::test_rounds_of_packed_texts_keep_to_their_text[medusa]'], 'heads learn to guess across the end of a packed text'),
    ('heads_learn_the_place_before', 'cotrain/students/medusa.py', 'at = self.places[:, ahead:][inside]', 'at = self.places[:, depth:-1][inside]', ['tests/test_heads_of_state.py::test_each_head_is_the_formula[medusa]'], 'heads learn the next token, which the anchor is already'),
    ('one_block_for_all', 'inference/proposers/medusa_network.py', 'self.bias[:heads].unbind(1), strict=True', 'self.bias[:1].unbind(1), strict=True', ['tests/test_heads_of_state.py::test_each_head_is_the_formula[medusa]'], 'every head has the bias of the first'),
    ('biases_that_vllm_drops', 'cotrain/export/medusa_layout.py', '"medusa_fc_bias": True', '"medusa_fc_bias": False', ['tests/test_heads_of_state.py::test_the_export_is_what_vllm_computes'], 'vLLM drops the biases in silence'),
    ('more_drafts_timed_than_made', 'inference/measure/costs.py', 'long = min(long, proposer.depths or long)', 'long = max(long, proposer.depths or long)', ['tests/test_heads_of_state.py::test_no_more_drafts_than_heads[medusa]'], 'three drafts timed as if they were eight'),
]
