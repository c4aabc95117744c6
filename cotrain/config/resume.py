"""Which settings may change on resume: those that change no weights, and more training."""

from typing import Any, Literal

Kind = Literal["free", "longer", "other"]

# of measuring, logging and speed; texts and states are the same wherever they are kept
FREE = ("label", "rollout.temperatures", "rollout.folder", "trainer.validations", "trainer.patience",
        "trainer.checkpoint_minutes", "trainer.threads", "trainer.remember_mb", "trainer.cache", "trainer.accelerator",
        "trainer.logger")  # fmt: skip
MEASURED = "bench."
BUDGETS = ("trainer.steps", "trainer.minutes", "minutes")
BY_ROUNDS = ("trainer.validations", *BUDGETS)  # what decides which texts a step of several rounds learns from


def kind(key: str, old: Any, new: Any, rounds: int = 1) -> Kind:
    """What a changed setting does to a run: nothing to its weights, more training, or another run. rounds: of
    sampling; budgets: a number, or None for one without end."""
    if rounds > 1 and key in BY_ROUNDS:
        return "other"
    if key == "measure":  # a finished training is measured when it is asked for
        return "longer" if new else "free"
    if key in FREE or key.startswith(MEASURED):
        return "free"
    if key in BUDGETS and old is not None and (new is None or new > old):
        return "longer"
    return "other"
