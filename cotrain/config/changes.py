"""Which settings may change when a run is resumed, and how settings of earlier versions are treated."""

from typing import Any, Literal

from cotrain.config.base import Mark, Settings, marked
from cotrain.config.settings import TrainConfig

Change = Literal["same", "free", "longer", "other"]


FREE = marked(TrainConfig, Mark.FREE)
BUDGETS = marked(TrainConfig, Mark.LONGER)


def change(key: str, old: Any, new: Any, draft: type[Settings] | None = None) -> Change:
    """Return what a changed setting means when a run is resumed.

    "same": both values mean the same, or no code reads the setting. "free": the run's weights do not depend on it.
    "longer": the training gets longer. "other": the new settings make another run.

    key: the setting's dotted key. old, new: its values in the stored run and now; a budget is a number, or None for no
    limit. draft: the class of the draft's settings; None for a command without a draft.
    """
    group, _, name = key.partition(".")
    lacking = group == "draft" and draft is not None and name not in draft.model_fields
    unknown = key == "target.weights" and None in (old, new)  # of an earlier version, or not on this machine
    if lacking or unknown or key == "init.cosine" or (key, old, new) == ("data.column", "text", None):
        return "same"
    if key == "measure":  # a finished training is measured when it is asked for
        return "longer" if new else "free"
    if key in FREE or group in FREE:
        return "free"
    if key in BUDGETS and old is not None and (new is None or new > old):
        return "longer"
    return "other"
