"""The shipped prompts: places in held-out texts of the standard library, and generated records."""

import json
import random
import sysconfig
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from cotrain.data.corpora import DOMAINS, Document, embedded
from cotrain.paths import folder
from inference.drafts.atomic import write_atomic

LENGTH = 400  # characters, about 120 tokens: benches cut them to their own prompt length
ALL = 10**9


def shipped() -> list[dict[str, str]]:
    """Rows {"domain", "text"}, domains in turn, so that any first n are spread over them."""
    lines = (folder("data") / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def shipped_ids(tokenizer: PreTrainedTokenizerBase, tokens: int) -> tuple[list[list[int]], list[list[int]]]:
    """The shipped prompts cut to `tokens` ids, each once: a third to rank checkpoints and draft lengths, the rest to
    time what is exported; domains in turn in both."""
    places: dict[tuple[int, ...], int] = {}
    for place, row in enumerate(shipped()):
        places.setdefault(tuple(tokenizer(row["text"])["input_ids"][:tokens]), place // len(DOMAINS))
    ranking = [list(ids) for ids, place in places.items() if place % 3 == 0]
    return ranking, [list(ids) for ids, place in places.items() if place % 3]


def make(count: int, path: Path, seed: int = 0) -> None:
    """Write `count` prompts a domain; the shipped ones are make(80, Path("data/prompts.jsonl"))."""
    rng = random.Random(seed)
    texts = {domain: _texts(domain) for domain in DOMAINS}
    chosen = {domain: [_cut(rng, rng.choice(texts[domain])) for _ in range(count)] for domain in DOMAINS}
    rows = [{"domain": domain, "text": chosen[domain][i]} for i in range(count) for domain in DOMAINS]
    write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))


def _texts(domain: str) -> list[str]:
    """Held-out documents that may be passed on: those of Python itself, and our own records."""
    documents = embedded(domain, "held_out", 300_000 if domain == "records" else ALL)
    return [d.text for d in documents if len(d.text) > 2 * LENGTH and (domain == "records" or _of_python(d))]


def _of_python(document: Document) -> bool:
    root = Path(sysconfig.get_paths()["stdlib"])
    return document.path.startswith("topics/") or (root / document.path).is_file()


def _cut(rng: random.Random, text: str) -> str:
    """LENGTH characters from the start of some line."""
    starts = [0] + [i + 1 for i, c in enumerate(text) if c == "\n" and i + 1 < len(text) - LENGTH]
    start = rng.choice(starts)
    return text[start : start + LENGTH]
