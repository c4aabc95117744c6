"""The picture of the audit's power: the largest score over its limit against the number of tokens, for each fault, by
the audit of the texts, by the target calls of a server that counts them, and by RUT on the same texts.

    python -m studies.audit_picture outputs/results/audit.json docs/audit.svg
"""

import json
import math
import sys
from html import escape
from pathlib import Path
from typing import Any

from inference.drafts.atomic import write_atomic

COLUMNS, WIDTH, HEIGHT = 3, 250, 130  # of a panel, in pixels
LEFT, TOP, GAP = 44, 44, 40
LOW, HIGH = 0.1, 20.0  # of strengths; others are drawn at the edge
STYLE = """text{font:12px system-ui,sans-serif;fill:#24292f}.page{fill:#fff}.small{font-size:11px;fill:#57606a}
.axis{stroke:#d0d7de}.limit{stroke:#57606a;stroke-dasharray:4 3}.audit,.rut,.calls{fill:none;stroke-width:2}
.audit{stroke:#0a7d33}.rut{stroke:#b3541e;stroke-dasharray:7 3}.calls{stroke:#0969da;stroke-dasharray:2 3}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.page{fill:#0d1117}.small{fill:#8d96a0}.axis{stroke:#30363d}
.limit{stroke:#8d96a0}.audit{stroke:#4ac26b}.rut{stroke:#f0883e}.calls{stroke:#58a6ff}}""".replace("\n", "")


def height(strength: float) -> float:
    """Pixels below a panel's top."""
    part = math.log(min(max(strength, LOW), HIGH) / LOW) / math.log(HIGH / LOW)
    return HEIGHT * (1 - part)


def panel(name: str, found: dict[str, Any], most: int, least: int) -> str:
    def at(tokens: int) -> float:
        return WIDTH * math.log(tokens / least) / math.log(most / least)

    parts = [f'<text y="-8">{escape(name)}</text>']
    for level in (0.1, 1, 10):
        kind, y = "limit" if level == 1 else "axis", height(level)
        parts.append(f'<path class="{kind}" d="M0 {y:.1f}H{WIDTH}"/>')
        parts.append(f'<text class="small" x="-6" y="{y + 4:.1f}" text-anchor="end">{level:g}</text>')
    for tokens in (1000, 10_000):
        x = at(tokens)
        parts.append(f'<text class="small" x="{x:.1f}" y="{HEIGHT + 15}" text-anchor="middle">{tokens:,}</text>')
        parts.append(f'<path class="axis" d="M{x:.1f} {HEIGHT}v4"/>')
    rut = [one["strength"] for one in found["rut"]]
    for kind, strengths in (("rut", rut), ("calls", found["strength_of_calls"]), ("audit", found["strength"])):
        points = [(at(x), height(y)) for x, y in zip(found["after"], strengths, strict=True)]
        parts.append(f'<path class="{kind}" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in points)}"/>')
    return "".join(parts)


def drawn(report: dict[str, Any]) -> str:
    faults = report["faults"]
    most = max(found["after"][-1] for found in faults.values())
    least = min(found["after"][0] for found in faults.values())
    rows = -(-len(faults) // COLUMNS)
    width, tall = COLUMNS * (WIDTH + GAP) + LEFT, TOP + rows * (HEIGHT + GAP + 18) + 8
    parts = []
    for number, (name, found) in enumerate(faults.items()):
        x, y = LEFT + number % COLUMNS * (WIDTH + GAP), TOP + 20 + number // COLUMNS * (HEIGHT + GAP + 18)
        parts.append(f'<g transform="translate({x} {y})">{panel(name, found, most, least)}</g>')
    said = "Largest score over its limit, by tokens: above the dashed line, the fault is seen"
    legend = (
        f'<text x="{LEFT - 30}" y="18">{said}</text>'
        f'<path class="audit" d="M{width - 280} 14h26"/><text x="{width - 248}" y="18">audit</text>'
        f'<path class="calls" d="M{width - 205} 14h26"/><text x="{width - 173}" y="18">its calls</text>'
        f'<path class="rut" d="M{width - 110} 14h26"/><text x="{width - 78}" y="18">RUT</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {tall}" role="img" aria-label="{said}">'
        f'<style>{STYLE}</style><rect class="page" width="{width}" height="{tall}" rx="6"/>{legend}{"".join(parts)}'
        "</svg>\n"
    )


if __name__ == "__main__":
    write_atomic(Path(sys.argv[2]), drawn(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
