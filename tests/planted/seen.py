"""Presets of trainers, loggers, pushing to the hub, examples."""

P, L, H = "tests/test_trainer_presets.py::", "tests/test_loggers.py::", "tests/test_hub.py::"

# fmt: off
ROWS_OF_BUGS = [
    ('gpu_preset_trains_on_a_cpu', 'cotrain/training/preconditions.py', '        if cfg.accelerator == "gpu":', '        if False:', [P + 'test_a_gpu_that_is_not_there_is_refused_by_check_and_run_alike'], 'a run of GPU size crawls on a CPU'),
    ('processes_share_a_gpu', 'cotrain/training/preconditions.py', 'elif cfg.devices > (found', 'elif cfg.devices > 8 * (found', [P + 'test_more_processes_than_gpus_are_refused'], 'Lightning fails after the target was loaded'),
    ('preset_of_its_own_steps', 'conf/trainer/gpu.yaml', 'batch: 16', 'batch: 16\nclip: 0.5', [P + 'test_a_preset_changes_what_its_machine_asks_for_and_nothing_else'], 'a preset changes what is learnt in silence'),
    ('curves_to_the_first_logger', 'cotrain/board/loggers.py', 'for logger in trainer.loggers:', 'for logger in trainer.loggers[:1]:', [L + 'test_wandb_gets_the_curves_of_tensorboard'], 'what was asked for stays empty'),
    ('run_left_open', 'cotrain/board/loggers.py', '        raise\n    logger.experiment.finish()', '        raise', [L + 'test_wandb_gets_the_curves_of_tensorboard'], 'the next run of a sweep goes on with the curves of this one'),
    ('failed_run_is_a_success', 'cotrain/board/loggers.py', 'finish(exit_code=1)', 'finish()', [L + 'test_a_resumed_run_is_the_same_one_and_a_failed_one_says_so'], 'a run that was killed looks finished'),
    ('resumed_run_is_a_new_one', 'cotrain/board/loggers.py', 'if file.exists() else', 'if not file else', [L + 'test_a_resumed_run_is_the_same_one_and_a_failed_one_says_so'], 'curves of one run are two'),
    ('pushed_without_asking_first', 'cotrain/commands/export.py', '        hub.require(cfg.push_to_hub)', '        pass', [H + 'test_who_may_not_push_is_told_before_anything_is_written'], 'minutes of export before a missing token is found'),
    ('card_names_a_place_of_this_machine', 'cotrain/export/hf.py', 'name or str(Path(output).absolute())', 'str(Path(output).absolute())', [H + 'test_the_hub_gets_the_folder_with_a_card_that_names_it'], 'the launch command on the hub runs nowhere'),
    ('feature_card_names_a_place_of_this_machine', 'cotrain/commands/export.py', 'cfg.push_to_hub or str(Path(cfg.output).absolute())', 'str(Path(cfg.output).absolute())', [H + 'test_the_hub_gets_the_folder_with_a_card_that_names_it'], 'the launch command on the hub runs nowhere'),
    ('local_target_unsaid', 'cotrain/commands/export.py', 'if hub.local(target):', 'if False:', [H + 'test_the_hub_gets_the_folder_with_a_card_that_names_it'], 'the card names a target that nobody finds'),
    ('hub_that_is_down_is_a_traceback', 'cotrain/export/hub.py', 'except (HTTPError, OSError, RuntimeError)', 'except KeyError', [H + 'test_a_hub_that_is_down_is_one_line'], 'no key to change is named'),
    ('no_word_of_the_folder_that_is_whole', 'cotrain/export/hub.py', 'with _told(repo, f"', 'with _told(repo + f"', [H + 'test_no_rights_are_one_line_and_the_folder_stays'], 'an export is made again that was there'),
    ('longest_prompt_is_the_shortest', 'cotrain/data/prompt_rows.py', 'longest = max(len(row["prompt"])', 'longest = min(len(row["prompt"])', ['tests/test_chats.py::test_prompts_are_never_cut'], 'the mend that an error names does not help'),
    ('label_of_a_sweep_cannot_be_typed', 'cotrain/config/overrides.py', '"push_to_hub",\n                    "baseline"', '"push_to_hub"', ['tests/test_compare.py::test_what_is_missing_is_named'], 'the table of a sweep cannot be made again'),
    ('share_before_the_speedup', 'cotrain/board/tags.py', '/speedup_share_of_cost_table"', '/share_of_cost_table"', ['tests/test_board.py::test_the_first_charts_are_acceptance_and_speed_up'], 'the first screen hides the speed-up behind a share of it'),
    ('timing_of_negative_seconds', 'cotrain/bench/timing_display.py', 'max(until - self.first, 0.0)', 'until - self.first', ['tests/test_answers.py::test_a_timing_that_takes_longer_than_it_may_says_why'], '18/-11 s at most'),
    ('tau_without_its_draft_length', 'cotrain/page/first_screen.py', 'if length else ""', 'if not length else ""', ['tests/test_page.py::test_tau_of_checkpoints_says_its_draft_length'], 'two values of tau on a page that seem to contradict each other'),
]  # fmt: on
