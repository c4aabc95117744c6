"""The replay of a recorded generation: its data and its controls; assets/replay.js draws it."""

from collections.abc import Sequence

from cotrain.page.loaded_run import Run
from cotrain.page.markup import Html, data_block, joined, tag
from cotrain.page.section import Section, by_run

KEYS = ("Keys: space plays and pauses, ← → step, ↑ ↓ change the row, - and + the speed, shift with an arrow turns the "
        "scene; drag turns it too.")  # fmt: skip
RULES = {
    "tree": "Siblings are tried in turn: p / q is that of the first, and falls with every refusal. ",
    "traversal": "The traversal rule tests from the leaves up: u is compared with another number than p / q. ",
    "block": "The block rule tests drafts together: u is compared with another number than p / q. ",
    "match": "The match rule draws the target's own token at u and keeps a draft that is the same. ",
    "coupled": "The coupled rule draws both sides with the same noise and keeps a draft where they agree. ",
}
LEGEND = (
    ("accepted", "accepted"),
    ("refused", "first refused"),
    ("unread", "unread behind it"),
    ("corrected", "corrected"),
    ("bonus", "bonus"),
)
BUTTONS = (("back", "◀", "a step back"), ("play", "▶ play", "play or pause"), ("forward", "▶|", "a step on"))


def replay(runs: Sequence[Run]) -> Section:
    """A player a run that recorded a generation."""
    lacking = "no generation was recorded: Engine(record=) does, and cotrain train and bench of this version"
    return Section("replay", "Replay of a generation", by_run(runs, _player), lacking)


def _player(run: Run) -> Html | None:
    found = run.documents["replay"]
    if not found or not found["rounds"]:
        return None
    name = f"replay-{run.number}"
    buttons = [tag("button", shown, type="button", data_do=do, aria_label=label) for do, shown, label in BUTTONS]
    rows = [tag("option", f"row {row + 1}", value=row) for row in range(len(found["rows"]))]
    last = len(found["rounds"]) - 1
    choices = (
        tag("label", "row ", tag("select", *rows, tag("option", "all rows", value=-1), data_do="row")),
        tag("label", "round ", tag("input", type="range", min=0, max=last, value=0, data_do="round")),
        tag("label", "speed ", tag("input", type="range", min=-2, max=3, step=1, value=0, data_do="speed")),
    )
    legend = [tag("li", tag("span", class_=f"key {kind}"), said) for kind, said in LEGEND]
    scene = tag("div", class_="scene", tabindex=0, role="application", aria_label=f"replay: {KEYS}")
    note = (
        RULES.get(found["rule"], ""),
        "Above: the draft's candidates. Below: the target's pass, one cell a candidate. ",
        KEYS,
    )
    return joined(
        tag("div", tag("div", *buttons, *choices, class_="controls"), scene, tag("ul", *legend, class_="legend"),
            tag("p", class_="said", aria_live="polite"), tag("div", class_="text"), tag("div", class_="drafts"),
            tag("p", *note, class_="note"), class_="replay", id=name, data_replay=f"{name}-data"),
        data_block(f"{name}-data", found),
    )  # fmt: skip
