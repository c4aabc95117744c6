"""Planted bugs of forced rounds, of what proposers hear, and of rounds over trees."""

# fmt: off
ROWS_OF_BUGS = [
    ('forced_rounds_draw_for_themselves', 'inference/exactness/forced.py', 'return self.follows[:, depth]', 'return super().draw(law, depth)', ['tests/test_forced.py::test_both_ways_find_the_laws_of_a_language_model[sampling0-False]'], 'laws behind another text'),
    ('forced_depths_of_another_round', 'inference/exactness/forced.py', 'logq[found.rows, t + j, j], alpha', 'logq[found.rows, t, j], alpha', ['tests/test_forced.py::test_both_ways_find_the_laws_of_a_language_model[sampling0-False]'], 'a draft is predicted with the law of the token before it'),
    ('forced_rounds_believe_the_proposal', 'inference/exactness/forced.py', 'if K and set(range(K)) <= set(turn.drawn):', 'if False:', ['tests/test_forced.py::test_wrong_laws_of_an_unknown_kind_fail'], 1),
    ('forced_lengths_as_asked_for', 'inference/exactness/forced.py', 'k=torch.tensor(proposal.k),', 'k=torch.tensor(turn.k),', ['tests/test_forced.py::test_look_up_is_predicted_to_the_call[match]', 'tests/test_forced.py::test_look_up_is_predicted_to_the_call[token]'], 'rounds that look-up had nothing for count as drafted'),
    ('waiting_prompts_enter_from_another_slot', 'inference/slots.py', 'run.proposer.enter(slot, len(run.active), row.text)', 'run.proposer.enter(self.target.rows, len(run.active), row.text)', ['tests/test_engine.py::test_prompts_that_wait_in_spare_slots_are_left_alone[token]'], 26),
    ('proposers_rows_do_not_move', 'inference/slots.py', 'run.proposer.move(len(run.active), slot)', 'run.proposer.move(slot, slot)', ['tests/test_proposers.py::test_rows_are_as_if_alone[example]'], 26),
    ('outcome_without_what_was_accepted', 'inference/engine.py', 'Outcome(valid, settled.table[:, 0], states, ', 'Outcome(valid, 0 * settled.table[:, 0], states, ', ['tests/test_tree_rounds.py::test_states_are_those_of_the_path'], 'a proposer goes on from the state of an older token'),
    ('accepted_path_left_where_it_was', 'inference/settled.py', '    lm.keep([len(text) - 1 for text in texts], path, at=at)\n', '', ['tests/test_tree_rounds.py::test_the_path_that_is_accepted_is_the_text[cpu-sampling0]'], 16),
    ('states_of_siblings', 'inference/settled.py', 'found = {layer: along(part, path) for layer, part in states.items()}', 'found = dict(states)', ['tests/test_tree_rounds.py::test_states_are_those_of_the_path'], 'a proposer reads what a refused sibling left'),
    ('penalties_see_siblings', 'inference/settled.py', '[*(paths[parent] if parent >= 0 else []), node]', 'list(range(node + 1))', ['tests/test_tree_rounds.py::test_the_path_that_is_accepted_is_the_text[cpu-sampling1]'], 11),
    ('draws_beside_the_laws_of_a_kind', 'inference/proposers/independent.py', 'drafted.append(turn.draw(laws[-1], depth))', 'drafted.append(turn.draw(laws[0], depth))', ['tests/test_proposers.py::test_drafts_are_drawn_from_the_laws_that_they_come_with[independent]'], 1),
]
