"""Kinds of draft on a GPU."""

# fmt: off
ROWS_OF_BUGS = [
    ('one_lacking_id_read_as_two', 'inference/models/cuda_graphs.py', 'tails, ends, u, temperature = columns.split((tail, 1, k, 1), 1)', 'tails, ends, u, temperature = columns.split((2, 1, k, 1), 1)', ['tests/test_gpu_kinds.py::test_replayed_drafts_are_those_of_single_steps[early_exit-one temperature]'], 'early exit fails on every GPU'),
    ('lengths_of_one_part_sent', 'inference/proposers/hybrid.py', 'own = [a + b for a, b in zip(own, self.sure.k, strict=True)]', 'pass', ['tests/test_gpu_counts.py::test_a_round_copies_once_and_reads_once[hybrid, token]'], 'a copy that the device waits for in every round'),
    ('recorded_in_the_other_vocabulary', 'inference/proposers/other_tokenizer.py', 'return Told(self.turn.on(given), self.texts, self.k, self.to_target, self.to_draft)', 'return self.turn.on(given)', ['tests/test_gpu_kinds.py::test_replayed_drafts_are_those_of_single_steps[other_tokenizer-cuts]'], 'drafts of another vocabulary are taken as they are'),
    ('a_row_left_out_is_stored_whole', 'inference/proposers/independent.py', 'left = [end if end - stored <= self.tail else stored for', 'left = [end for', ['tests/test_fourth_round.py::test_what_look_up_drafts_is_not_taken_for_stored'], 'the draft reads a hole behind what look-up drafted'),
    ('tables_made_anew_under_recordings', 'inference/proposers/other_tokenizer.py', 'if self.tabled is not self.inner.lm:', 'if True:', ['tests/test_gpu_kinds.py::test_tables_that_recordings_read_live_as_long_as_they_do'], 'replayed drafts read freed memory'),
    ('tables_of_another_vocabulary', 'inference/proposers/other_tokenizer.py', 'self.vocabulary, self.inner.opened = host.vocabulary, None', 'self.vocabulary = host.vocabulary', ['tests/test_shared_proposers.py::test_a_proposer_is_as_new_for_each_engine[other_tokenizer]'], 'drafts for an engine of fewer ids end the call'),
]
