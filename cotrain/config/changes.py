"""Which settings may change when a run is resumed, and settings of earlier versions."""

from typing import Any, Literal

from cotrain.config.base import Mark, Settings, marked
from cotrain.config.settings import TrainConfig

Change = Literal["same", "free", "longer", "other"]


FREE = marked(TrainConfig, Mark.FREE)
BUDGETS = marked(TrainConfig, Mark.LONGER)


def change(key: str, old: Any, new: Any, rounds: int = 1, draft: type[Settings] | None = None) -> Change:
    """Return what a changed setting means for the run that is resumed.

    "same": the old value meant the same, or nothing read it. "free": the weights of the run stay as they are. "longer":
    its training gets longer. "other": it is another run.

    key, old, new: the setting and its values; a budget is a number, or None for no limit. rounds: rollout.rounds.
    draft: the class of the draft's settings.
    """
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
