"""Planted bugs of parallel drafts."""

# fmt: off
ROWS_OF_BUGS = [
    ('masks_stored_as_text', 'inference/proposers/parallel.py', 'self.stored = [len(text) if k else begin', 'self.stored = [len(text) + K - 1 if k else begin', ['tests/test_students.py::test_the_law_that_learns_is_the_law_that_is_served[parallel]'], 'what the slot holds of a draft that was accepted is a mask'),
    ('rows_read_at_one_anchor', 'inference/models/one_pass.py', 'places = anchors.unsqueeze(1) +', 'places = 0 * anchors.unsqueeze(1) +', ['tests/test_students.py::test_the_law_that_learns_is_the_law_that_is_served[parallel]'], 'laws of a token before the anchor'),
    ('all_drafts_from_one_law', 'inference/models/one_pass.py', 'drafts.append(turn.draw(laws[-1], depth))', 'drafts.append(turn.draw(laws[0], depth))', ['tests/test_proposers.py::test_drafts_are_drawn_from_the_laws_that_they_come_with[parallel]'], 1),
    ('compiled_laws_cooler_than_its_draws', 'inference/models/one_pass.py', 'return draw(laws, u), laws', 'return draw(laws.roll(1, 1), u), laws', ['tests/test_parallel.py::test_compiled_it_gives_the_same_text_and_counts[sampled-1]'], 1),
    ('compiled_rows_of_one_temperature', 'inference/models/one_pass.py', 'temperature.to(logits.dtype).view(-1, 1, 1)', 'temperature.to(logits.dtype)[0]', ['tests/test_parallel.py::test_compiled_it_gives_the_same_text_and_counts[each its own-3]'], 1),
    ('drafts_beyond_what_was_learnt', 'inference/proposers/parallel.py', 'min(self.most, self.lm.context', 'min(99, self.lm.context', ['tests/test_parallel.py::test_no_more_is_drafted_than_was_learnt'], 'masks at depths that never learnt'),
    ('a_mask_sees_masks_of_other_rounds', 'cotrain/students/mask_blocks.py', '(masks.start.unsqueeze(1) == masks.start) & (', '(', ['tests/test_parallel.py::test_what_each_token_and_each_mask_sees'], 'what learns is not what is served'),
    ('a_mask_sees_the_text_up_to_itself', 'cotrain/students/mask_blocks.py', 'until = torch.cat([at, masks.start])', 'until = torch.cat([at, masks.place])', ['tests/test_parallel.py::test_what_each_token_and_each_mask_sees'], 'what learns reads drafts that a round does not have yet'),
    ('masks_see_the_text_before', 'cotrain/students/parallel.py', 'visible(masks, length, None if position_ids is None else segments(places))', 'visible(masks, length)', ['tests/test_parallel.py::test_packed_texts_are_guessed_as_if_alone'], 'packed texts read as one'),
    ('dropped_starts_count_for_nothing', 'cotrain/losses/over_guesses.py', 'weight = weight if guess.share == 1 else weight / guess.share', 'pass', ['tests/test_parallel.py::test_dropped_starts_are_made_up_for[kl]'], 'later depths learn the less, the more is dropped'),
    ('rounds_end_where_starts_were_dropped', 'cotrain/losses/over_guesses.py', 'torch.where(made, logq, mean.log())', 'logq', ['tests/test_parallel.py::test_tokens_of_no_guess_are_accepted_as_the_others_are'], 'weights of the calls of shorter rounds'),
    ('the_end_of_text_as_mask', 'cotrain/students/parallel.py', 'padding not in (ends if', 'padding in (ends if', ['tests/test_parallel.py::test_the_mask_is_an_id_that_texts_do_not_have[32-2-2-31]'], 'a mask that means something in a text'),
    ('served_token_by_token', 'inference/servers/vllm_server.py', '({"parallel_drafting": True} if parallel else {})', '{}', ['tests/test_parallel.py::test_engines_are_told_that_it_drafts_in_parallel'], 'the engine would draft at depth 0 alone'),
]
