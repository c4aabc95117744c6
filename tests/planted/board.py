"""What a run shows: TensorBoard, displays of long jobs, answers for machines."""

T, B, A = "tests/test_train.py::", "tests/test_board.py::", "tests/test_answers.py::"

# fmt: off
ROWS_OF_BUGS = [
    ('training_one_step_off', 'cotrain/training/learning_curves.py', 'found | own, trainer.global_step)', 'found | own, trainer.global_step - 1)', [B + 'test_training_is_logged_at_the_steps_done_with_the_rate_that_made_them'], 'curves of two sources do not line up'),
    ('acceptance_one_step_off', 'cotrain/training/held_out_points.py', 'whole(module.judged, module.temperature, self.served[1]), trainer.global_step)', 'whole(module.judged, module.temperature, self.served[1]), max(trainer.global_step - 1, 0))', [B + 'test_a_run_of_ordinary_length_has_twenty_points_and_no_step_twice'], 'curves of two sources do not line up'),
    ('rate_of_another_step', 'cotrain/training/learning_curves.py', '        if module.watched:\n            self.rate', '        if not module.watched:\n            self.rate', [B + 'test_training_is_logged_at_the_steps_done_with_the_rate_that_made_them'], 'the rate is not the one that the step was made with'),
    ('resumed_steps_twice', 'cotrain/board/loggers.py', 'purge_step=again', 'purge_step=None', [T + 'test_an_interrupted_run_ends_as_if_it_had_not_been'], 'steps that a killed run had made beyond its checkpoint stay in the curves'),
    ('measured_in_inference_mode', 'cotrain/training/callbacks.py', 'with torch.inference_mode(False), torch.no_grad():', 'with torch.no_grad():', ['tests/test_module.py::test_speed_is_measured_at_validations_and_survives_a_checkpoint'], 'a copy that two engines cannot read'),
    ('points_cost_what_they_like', 'cotrain/training/held_out_points.py', 'return self.seconds + self.last <= MOST_TIME * self.clock.progress.elapsed', 'return True', [B + 'test_points_never_take_more_than_their_share_of_time'], 'looking takes longer than training'),
    ('points_are_training', 'cotrain/training/clock.py', '        yield\n        self.since = time.monotonic()', '        yield', [B + 'test_a_run_of_ordinary_length_has_twenty_points_and_no_step_twice'], 'trainer.minutes are spent on looking'),
    ('more_texts_than_asked_for', 'cotrain/evaluation/held_out.py', '-(-len(self.texts) // count)', 'max(len(self.texts) // count, 1)', [B + 'test_a_part_is_never_more_than_asked_for'], 'a point costs up to twice its share'),
    ('text_is_markup', 'cotrain/board/marked_text.py', 'one if one.isalnum() else f"&#{ord(one)};"', 'one', [B + 'test_text_is_shown_as_it_stands'], 'what a model says changes the page'),
    ('half_characters', 'inference/output.py', "            if not text.endswith(\"\\ufffd\"):\n", "            if True:\n", [B + 'test_pieces_of_a_text_wait_for_whole_characters'], 'a character of several tokens is torn'),
    ('words_between_json', 'cotrain/machine_output.py', 'with redirect_stdout(sys.stderr):', 'with redirect_stdout(out):', [A + 'test_json_alone_goes_to_standard_output'], 'a machine cannot read the answer'),
    ('no_interval_no_doubt', 'inference/report/table.py', '"faster" if low > 1', '"faster" if whole["value"] > 1', [A + 'test_the_verdict_is_one_line'], 'a speed-up is claimed that was not shown'),
    ('time_left_of_a_fresh_run', 'cotrain/progress_display.py', 'made = self.done - self.begun', 'made = self.done', [A + 'test_lines_come_now_and_then_with_the_time_left'], 'a resumed run promises too little time'),
    ('bar_left_open', 'cotrain/progress_display.py', '    def __exit__(self, *_: object) -> None:\n        self.close()', '    def __exit__(self, *_: object) -> None:\n        pass', [A + 'test_a_terminal_gets_a_bar_that_is_closed'], 'an error leaves the terminal without its cursor'),
]  # fmt: on
