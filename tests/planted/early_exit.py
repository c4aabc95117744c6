"""Planted bugs of early exits."""

# fmt: off
ROWS_OF_BUGS = [
    ('exit_reads_the_token_before_the_anchor_again', 'inference/proposers/early_exit.py', 'self.stored = [len(text) - 1 for text in turn.texts]', 'self.stored = [max(len(text) - 2, 0) for text in turn.texts]', ['tests/test_early_exit.py::test_what_verification_stores_is_the_targets_own'], "keys and values of the changed layers stay in the target's slots: its texts have another law"),
    ('exit_changes_the_target', 'inference/proposers/early_exit_network.py', 'plain.weight = _frozen(plain.weight.to(wide) + up @ down, plain.weight)', 'plain.weight.data.add_((up @ down).to(plain.weight.dtype))', ['tests/test_early_exit.py::test_the_targets_weights_are_the_same_with_it_and_without[dtype0]'], "a draft's changes are added to the target"),
    ('exit_of_an_old_network', 'inference/proposers/early_exit_network.py', 'or found[1] != made or', 'or', ['tests/test_early_exit.py::test_changes_are_added_to_copies'], 'a draft is served with the weights of an earlier step'),
    ('exit_teaches_with_changed_text', 'cotrain/students/early_exit.py', 'learning(self.network, self.target, T)', 'learning(self.network, self.target, 0)', ['tests/test_students.py::test_the_law_that_learns_is_the_law_that_is_served[early_exit]'], 'rounds learn from keys and values that no target stores'),
    ('exit_sees_the_text_up_to_itself', 'cotrain/students/early_exit.py', 'every.unsqueeze(1) - every > depth', 'every.unsqueeze(1) - every > 0', ['tests/test_students.py::test_the_law_that_learns_is_the_law_that_is_served[early_exit]'], 'later drafts learn from what the target stores of drafts before, which it has not read'),
    ('exit_places_of_no_round', 'cotrain/students/early_exit.py', 'there = within >= depth', 'there = within >= 0', ['tests/test_early_exit.py::test_packed_texts_are_read_apart'], 'rounds learn that begin before their text'),
    ('exit_without_its_norm', 'inference/proposers/early_exit_network.py', '    final_norm(model).weight = network.norm\n', '', ['tests/test_students.py::test_every_loss_reaches_every_parameter[kl-early_exit]'], 'the norm never learns'),
]
