"""Names of curves (tags), and the layout of charts and texts, in TensorBoard. TensorBoard groups curves by the part of
the tag before the slash, and sorts the groups."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

SERVING, TRAINING, DEPTH, HELD_OUT, DOMAINS, TIMED, TEXT, FINAL = (
    "1_serving",
    "2_training",
    "3_depth",
    "4_held_out",
    "5_domains",
    "6_timed",
    "7_text",
    "8_final",
)
CURVES = "tensorboard"  # a folder in the run's folder; it contains a folder with the run's name
ACCEPTANCE, TAU, SPEEDUP = f"{SERVING}/acceptance", f"{SERVING}/tau", f"{SERVING}/speedup"
LOW, HIGH = f"{SERVING}/speedup_low", f"{SERVING}/speedup_high"
SHARE = f"{SERVING}/speedup_share_of_cost_table"  # sorted by name, its chart follows those of the speed-up
LOSS, RATE, NORM = f"{TRAINING}/loss", f"{TRAINING}/learning_rate", f"{TRAINING}/gradient_norm"
TOKENS_PER_SECOND = f"{TRAINING}/tokens_per_second"
# keys of `cotrain.bench.measurement.quick` -> tags
SPEED = {
    "speedup": SPEEDUP,
    "low": LOW,
    "high": HIGH,
    "share_of_cost_table": SHARE,
    "tau": f"{TIMED}/tau",
    "tokens_per_second": f"{TIMED}/tokens_per_second",
}

# kind of token -> HTML element that marks it in a text; and the legend
ELEMENTS = {"drafted": "strong", "corrected": "em", "bonus": "code"}
LEGEND = "**accepted drafts**, *corrected tokens*, `bonus tokens`"


def at(name: str, temperature: float) -> str:
    """Return the tag of a figure `name` that was computed on held-out texts at one temperature of the target."""
    return f"{HELD_OUT}/{name}_T{temperature:g}"


def speed(figures: Mapping[str, float]) -> dict[str, float]:
    """Return the figures of `cotrain.bench.measurement.quick`, keyed by tag. NaN values, for example the interval of a
    few batches, are left out."""
    return {SPEED[name]: value for name, value in figures.items() if math.isfinite(value)}


def layout() -> dict[str, Any]:
    """Return the layout of TensorBoard's tab CUSTOM SCALARS, which says which curves share a chart."""
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


def marked_text(prompt: str, parts: Iterable[tuple[str, str]], tokens: int, calls: int) -> str:
    """Return a generated text in Markdown, in which each token is marked by its kind (drafted, corrected or bonus).
    prompt: its text. parts: pairs (kind of token, text). tokens, calls: the number of new tokens and the number of
    target calls."""
    text = "".join(f"<{ELEMENTS[kind]}>{escaped_markdown(part)}</{ELEMENTS[kind]}>" for kind, part in parts)
    return f"{LEGEND}; {tokens} new tokens in {calls} target calls\n\n{escaped_markdown(prompt)}{text}"


def escaped_markdown(text: str) -> str:
    """Escape text so that TensorBoard's Markdown shows it unchanged. All characters but letters and digits become
    character references. A line end becomes a visible sign and a line break."""
    numbers = "".join(one if one.isalnum() else f"&#{ord(one)};" for one in text.replace("\r\n", "\n"))
    return numbers.replace("&#10;", "&#8629;<br>")
