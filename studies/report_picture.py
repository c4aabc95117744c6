"""The picture of an annotated page, `docs/report.png`: a report's page with numbers beside its parts, less its longest.

    cotrain report run=data/drafts/smollm2/report.json page=/tmp/page.html
    python -m studies.report_picture /tmp/page.html docs/report.png

Needs Chromium and pillow. The notes to the numbers are in docs/report.md.
"""

import json
import sys
from io import BytesIO
from pathlib import Path

from PIL import Image

from inference.drafts.atomic import write_atomic
from tests.browser import Browser

WIDTH, COLOURS, SECONDS = 920, 24, 300.0
NOTED = [  # texts on the page, in the order of their numbers
    "at temperature 1: serve with k",
    "tokens per target call, measured",
    "yes, checked",
    "share of what the costs of its parts allow",
    "tau predicted on those",
    "acceptance rate on held-out texts",
    "the same by n-gram look-up",
    "Acceptance by depth",
    "Acceptance by length of the context",
    "Tokens per target call",
    "Speed-up by draft length",
    "Milliseconds of a round",
    "(a) with shared noise the texts",
]
MARK = """((texts) => {
    const part = (title) => [...document.querySelectorAll('h2')].find((e) => e.textContent === title);
    part('Positions at which target and draft differ').parentElement.style.display = 'none';
    texts.forEach((text, i) => {
    const all = [...document.querySelectorAll('main *, body *')];
    const has = (e) => e.textContent.includes(text);
    const found = all.filter((e) => has(e) && ![...e.children].some(has));
    const box = found[found.length - 1].getBoundingClientRect(), mark = document.createElement('span');
    mark.textContent = i + 1;
    mark.style.cssText = `position:absolute;top:${box.top + scrollY}px;width:22px;height:22px;border-radius:11px;`
        + 'background:#b3261e;color:#fff;font:bold 13px/22px sans-serif;text-align:center;z-index:9';
    mark.style.left = `${Math.max(box.left + scrollX - 24, 2)}px`;
    document.body.append(mark); });
    return part('Origin of the figures').getBoundingClientRect().top + scrollY; })(%s)"""


def main(page: Path, picture: Path) -> None:
    with Browser() as browser:
        browser.look(WIDTH, 6000)  # charts are drawn when they come into view
        browser.ask("Page.navigate", url=page.resolve().as_uri())
        browser.until("document.querySelectorAll('.plot-container').length > 7", SECONDS)
        height = browser.run(MARK % json.dumps(NOTED))
        raw = picture.with_suffix(".raw.png")
        browser.picture(raw)
    image = Image.open(raw).convert("RGB").crop((0, 0, WIDTH, int(height) - 10))
    raw.unlink()
    small = BytesIO()
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    write_atomic(picture, small.getvalue())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
