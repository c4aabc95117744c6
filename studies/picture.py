"""The picture in the README: a text with accepted drafts in colour, by the draft that comes along.

    python -m studies.picture outputs/results/picture.json docs/accepted.svg

It decodes one answer of SmolLM2-135M-Instruct with its card's settings, writes the tokens with their kinds to the
report, and draws them. The picture has its own colours for light and dark pages.
"""

import json
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from inference import Sampling, load
from inference.drafts.atomic import write_atomic
from inference.measure.environment import environment
from inference.output import pieces

PROMPT = "Write a Python function that counts the words of a file."
CARD = Sampling(temperature=0.2, top_p=0.9)
WIDTH, CHARACTER, LINE, LEFT = 84, 8.43, 20, 14  # characters of a line; pixels of a character, a line, the margin
STYLE = """text{font:14px ui-monospace,Menlo,Consolas,monospace;white-space:pre}.page{fill:#fff}.drafted{fill:#0a7d33}
.corrected{fill:#b3541e}.bonus{fill:#24292f}.said{fill:#57606a}@media(prefers-color-scheme:dark){.page{fill:#0d1117}
.drafted{fill:#4ac26b}.corrected{fill:#f0883e}.bonus{fill:#e6edf3}.said{fill:#8d96a0}}"""


def decoded() -> dict[str, Any]:
    engine = load(Path(__file__).parents[1] / "data" / "drafts" / "smollm2")
    asked = [{"role": "user", "content": PROMPT}]
    events = [*engine.stream(asked, max_new_tokens=150, sampling=CARD, seed=2)]
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    parts = [*pieces(events, lambda ids: str(tokenizer.decode(ids)))]
    return {"prompt": PROMPT, "rounds": len(events), "tokens": sum(len(one.ids) for one in events), "parts": parts}


def lines(parts: list[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Lines of at most WIDTH characters, each a list of (kind, text)."""
    line: list[tuple[str, str]] = []
    for kind, text in parts:
        for number, piece in enumerate(text.split("\n")):
            if number or sum(len(one) for _, one in line) + len(piece) > WIDTH:
                yield line
                line = []
            line.append((kind, piece))
    yield line


def drawn(report: dict[str, Any]) -> str:
    rows = [line for line in lines(report["parts"]) if any(text.strip() for _, text in line)]
    height = LINE * (len(rows) + 3)
    said = (
        f"{report['tokens']} tokens in {report['rounds']} passes of the target: accepted drafts, corrections, its own"
    )
    texts = [f'<text class="said" x="{LEFT}" y="{LINE + 4}">{escape("> " + report["prompt"])}</text>']
    for number, row in enumerate(rows):
        spans = "".join(f'<tspan class="{kind}">{escape(text)}</tspan>' for kind, text in row)
        texts.append(f'<text x="{LEFT}" y="{LINE * (number + 2) + 4}" xml:space="preserve">{spans}</text>')
    legend = said.rpartition(":")[0]
    spans = "".join(
        f'<tspan class="{kind}">{word}</tspan>'
        for kind, word in (("said", legend + ": "), ("drafted", "accepted drafts"), ("said", ", "))
        + (("corrected", "corrections"), ("said", ", "), ("bonus", "the target's own"))
    )
    texts.append(f'<text x="{LEFT}" y="{height - 8}" xml:space="preserve">{spans}</text>')
    width = round(WIDTH * CHARACTER + 2 * LEFT)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(said)}">'
        f'<style>{STYLE}</style><rect class="page" width="{width}" height="{height}" rx="6"/>{"".join(texts)}</svg>\n'
    )


if __name__ == "__main__":
    report = {
        "environment": environment(),
        "command": "python -m studies.picture " + " ".join(sys.argv[1:]),
    } | decoded()
    write_atomic(Path(sys.argv[1]), json.dumps(report, indent=1) + "\n")
    write_atomic(Path(sys.argv[2]), drawn(report))
