"""A run's budget of time, and the steps that it took."""

# fmt: off
ROWS_OF_BUGS = [
    ('a_run_without_its_rest', 'cotrain/training/run_budget.py', 'cfg.minutes - rest / 60 - cfg', 'cfg.minutes - cfg', ['tests/test_schedule.py::test_training_has_what_the_rest_of_the_run_leaves'], "minutes= are all of the training's"),
    ('measured_or_not', 'cotrain/training/run_budget.py', 'BEHIND * cfg.measure', 'BEHIND', ['tests/test_schedule.py::test_training_has_what_the_rest_of_the_run_leaves'], 'time is kept for what does not come'),
    ('later_minutes_lost', 'cotrain/training/progress.py', 'kept["left"] + self.whole - kept["whole"]', 'kept["left"]', ['tests/test_schedule.py::test_minutes_that_a_run_is_given_later_are_its_training_s'], 'a run is not made longer'),
    ('time_spent_is_forgotten', 'cotrain/training/fit.py', 'time.monotonic() - job.start', '0.0', ['tests/test_schedule.py::test_a_run_leaves_time_for_what_comes_behind_its_training'], 'what came before the first step is not of the run'),
    ('validation_is_free', 'cotrain/training/fit.py', 'validation = time.monotonic() - began', 'validation = 0.0', ['tests/test_schedule.py::test_a_run_leaves_time_for_what_comes_behind_its_training'], 'a run ends its validations too late'),
    ('steps_that_were_asked_for', 'cotrain/training/distil.py', '"seed": job.cfg.trainer.seed, "steps": steps,', '"seed": job.cfg.trainer.seed, "steps": job.cfg.trainer.steps,', ['tests/test_schedule.py::test_training_ends_with_its_minutes'], 'a run that time ended is said to have taken all its steps'),
    ('an_old_cap_stays', 'cotrain/training/progress.py', '"left": self.left}', '"left": self.minutes}', ['tests/test_schedule.py::test_a_raised_budget_of_training_counts_beside_the_run_s'], 'more trainer.minutes= beside minutes= train no step more'),
]
