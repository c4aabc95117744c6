"""Names of what a run writes to TensorBoard, which draws a group for each word before the slash, in their order."""

import math
from collections.abc import Mapping
from typing import Any

SERVING, TRAINING, DEPTH, HELD_OUT, DOMAINS, TIMED, ROLLOUT, TEXT, FINAL = (
    "1_serving", "2_training", "3_depth", "4_held_out", "5_domains", "6_timed", "7_rollout", "8_text", "9_final",
)  # fmt: skip
CURVES = "tensorboard"  # folder of a run: all that TensorBoard is to show, in one named as the run
ACCEPTANCE, TAU, SPEEDUP = f"{SERVING}/acceptance", f"{SERVING}/tau", f"{SERVING}/speedup"
LOW, HIGH = f"{SERVING}/speedup_low", f"{SERVING}/speedup_high"
SHARE = f"{SERVING}/speedup_share_of_cost_table"  # charts come in the order of their names: behind the speed-up
LOSS, RATE, NORM = f"{TRAINING}/loss", f"{TRAINING}/learning_rate", f"{TRAINING}/gradient_norm"
TOKENS_PER_SECOND = f"{TRAINING}/tokens_per_second"
# of `measurement.quick`
SPEED = {"speedup": SPEEDUP, "low": LOW, "high": HIGH, "share_of_cost_table": SHARE, "tau": f"{TIMED}/tau",
         "tokens_per_second": f"{TIMED}/tokens_per_second"}  # fmt: skip


def at(name: str, temperature: float) -> str:
    """A figure of the held-out texts of one temperature of the target."""
    return f"{HELD_OUT}/{name}_T{temperature:g}"


def speed(figures: Mapping[str, float]) -> dict[str, float]:
    """What `measurement.quick` found, by tag; ends of an interval that one batch cannot tell are left out."""
    return {SPEED[name]: value for name, value in figures.items() if math.isfinite(value)}


def layout() -> dict[str, Any]:
    """Of the custom scalars: curves that belong in one chart."""
    return {
        "Serving": {
            "acceptance": ["Multiline", [f"^{ACCEPTANCE}$"]],
            "tau": ["Multiline", [f"^{TAU}$", f"^{TIMED}/tau$"]],
            "speed-up and its 95 % interval": ["Margin", [SPEEDUP, LOW, HIGH]],
        },
        "Acceptance by depth": {"given that the drafts before were accepted": ["Multiline", [f"^{DEPTH}/"]]},
        "Training": {
            "loss and its parts": ["Multiline", [f"^{LOSS}"]],
            "acceptance by temperature": ["Multiline", [f"^{HELD_OUT}/acceptance_"]],
        },
    }
