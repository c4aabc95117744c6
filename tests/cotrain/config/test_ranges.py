"""Which changed settings continue a run and which make another."""

from cotrain.config.changes import change
from cotrain.config.groups import Trainer
from tests.inference.test_drafting import calls  # noqa: F401 - a fixture


def test_every_trainer_setting_makes_another_run_unless_it_only_stores_or_reports() -> None:
    free = {"validations", "patience", "remember_mb", "checkpoint_minutes", "cache", "threads", "accelerator", "logger"}
    longer = {"steps", "minutes"}
    others = {*Trainer.model_fields} - free - longer
    assert {change(f"trainer.{name}", 1, 2) for name in free} == {"free"}
    assert {change(f"trainer.{name}", 1, 2) for name in longer} == {"longer"}
    assert {name for name in others if change(f"trainer.{name}", 1, 2) != "other"} == set() and "precision" in others
