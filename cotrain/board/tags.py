"""Names, charts and texts that TensorBoard shows of a run. It draws a group for each word before the slash, by name."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

SERVING, TRAINING, DEPTH, HELD_OUT, DOMAINS, TIMED, ROLLOUT, TEXT, FINAL = (
    "1_serving", "2_training", "3_depth", "4_held_out", "5_domains", "6_timed", "7_rollout", "8_text", "9_final",
)  # fmt: skip
CURVES = "tensorboard"  # in the run's folder, with a folder of the run's name in it
ACCEPTANCE, TAU, SPEEDUP = f"{SERVING}/acceptance", f"{SERVING}/tau", f"{SERVING}/speedup"
LOW, HIGH = f"{SERVING}/speedup_low", f"{SERVING}/speedup_high"
SHARE = f"{SERVING}/speedup_share_of_cost_table"  # its chart follows the speed-up's: charts are sorted by name
LOSS, RATE, NORM = f"{TRAINING}/loss", f"{TRAINING}/learning_rate", f"{TRAINING}/gradient_norm"
TOKENS_PER_SECOND = f"{TRAINING}/tokens_per_second"
# by the names of `cotrain.bench.measurement.quick`
SPEED = {"speedup": SPEEDUP, "low": LOW, "high": HIGH, "share_of_cost_table": SHARE, "tau": f"{TIMED}/tau",
         "tokens_per_second": f"{TIMED}/tokens_per_second"}  # fmt: skip

# HTML elements of a text by the kind of its tokens, and the line that explains them
ELEMENTS = {"drafted": "strong", "corrected": "em", "bonus": "code"}
LEGEND = "**accepted drafts**, *corrected tokens*, `bonus tokens`"


def at(name: str, temperature: float) -> str:
    """The tag of a figure of the held-out texts at one temperature of the target."""
    return f"{HELD_OUT}/{name}_T{temperature:g}"


def speed(figures: Mapping[str, float]) -> dict[str, float]:
    """Figures of `cotrain.bench.measurement.quick` by tag, without the ends of an interval that one batch lacks."""
    return {SPEED[name]: value for name, value in figures.items() if math.isfinite(value)}


def layout() -> dict[str, Any]:
    """Layout of the custom scalars: curves that share a chart."""
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


def marked(prompt: str, parts: Iterable[tuple[str, str]], tokens: int, calls: int) -> str:
    """A generated text in Markdown: parts are its pieces as (kind of token, text), each marked by its kind; tokens,
    calls: new tokens, and the target calls that they took."""
    text = "".join(f"<{ELEMENTS[kind]}>{escaped(part)}</{ELEMENTS[kind]}>" for kind, part in parts)
    return f"{LEGEND}; {tokens} new tokens in {calls} target calls\n\n{escaped(prompt)}{text}"


def escaped(text: str) -> str:
    """Text that TensorBoard's Markdown shows unchanged: every character but letters, digits and single spaces as its
    number, line ends as a sign and a break."""
    numbers = "".join(one if one.isalnum() else f"&#{ord(one)};" for one in text.replace("\r\n", "\n"))
    return numbers.replace("&#10;", "&#8629;<br>")
