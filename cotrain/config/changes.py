"""Which settings may change when a run is resumed, and settings of earlier versions."""

from typing import Any, Literal

from cotrain.config.base import Mark, Settings, marked
from cotrain.config.settings import TrainConfig

Change = Literal["same", "free", "longer", "other"]


FREE = marked(TrainConfig, Mark.FREE)
BUDGETS = marked(TrainConfig, Mark.LONGER)


def change(key: str, old: Any, new: Any, rounds: int = 1, draft: type[Settings] | None = None) -> Change:
    """Return what a changed setting means: the weights of a run stay as they are ("free"), the training gets longer
    ("longer"), or it is another run ("other"). "same": an earlier version had another default that meant the same, or
    read nothing of it. rounds: rounds of sampling. draft: the settings of its kind. A budget is a number, or None
    without a limit."""
    group, _, name = key.partition(".")
    lacking = group == "draft" and draft is not None and name not in draft.model_fields
    unknown = key == "target.weights" and None in (old, new)  # of an earlier version, or not on this machine
    if lacking or unknown or key == "init.cosine" or (key, old, new) == ("data.column", "text", None):
        return "same"
    if rounds > 1 and key in {"trainer.validations", *BUDGETS}:  # they decide which texts a step learns from
        return "other"
    if key == "measure":  # a finished training is measured when it is asked for
        return "longer" if new else "free"
    if key in FREE or group in FREE:
        return "free"
    if key in BUDGETS and old is not None and (new is None or new > old):
        return "longer"
    return "other"
