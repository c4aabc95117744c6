"""Write the prompts and sources that are shipped: `data/prompts.jsonl` and `data/sources.jsonl`.

    python -m studies.shipped_prompts FOLDER

They are parts of held-out documents that may be redistributed: those of Python itself, and generated records.
"""

import json
import random
import sys
import sysconfig
from pathlib import Path

from cotrain.data.corpora import ALL, DOMAINS, PROMPTS, SOURCES, Document, embedded
from cotrain.data.sequence_tasks import TASKS, functions, sentences
from inference.drafts.atomic import write_atomic

PROMPT_LENGTH = 400  # characters, about 120 tokens; benchmarks cut prompts to their own length


def write_prompts(count: int, path: Path, seed: int = 0) -> None:
    """Write `count` prompts per domain to the file `path`."""
    rng = random.Random(seed)
    texts = {domain: _texts(domain) for domain in DOMAINS}
    chosen = {domain: [_cut(rng, rng.choice(texts[domain])) for _ in range(count)] for domain in DOMAINS}
    rows = [{"domain": domain, "text": chosen[domain][i]} for i in range(count) for domain in DOMAINS]
    write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))


def _texts(domain: str) -> list[str]:
    """Return the held-out texts that may be redistributed: those of Python itself, and generated records."""
    documents = embedded(domain, "held_out", 300_000 if domain == "records" else ALL)
    return [d.text for d in documents if len(d.text) > 2 * PROMPT_LENGTH and (domain == "records" or is_of_python(d))]


def is_of_python(document: Document) -> bool:
    """Return whether the document is of Python itself: a help topic, or a file of its standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return document.path.startswith("topics/") or (root / document.path).is_file()


def _cut(rng: random.Random, text: str) -> str:
    """Return `PROMPT_LENGTH` characters of the text, from the beginning of a random line."""
    starts = [0] + [i + 1 for i, c in enumerate(text) if c == "\n" and i + 1 < len(text) - PROMPT_LENGTH]
    start = rng.choice(starts)
    return text[start : start + PROMPT_LENGTH]


def write_sources(count: int, path: Path, seed: int = 0) -> None:
    """Write `count` held-out sources per task, of Python's own files and of records, to the file `path`."""
    rng, by_task = random.Random(seed), {task: list[str]() for task in TASKS}
    documents = [one for one in embedded("code", "held_out", ALL) if is_of_python(one)]
    pairs = [pair for one in documents for pair in functions(one.text)]
    pairs += [pair for one in embedded("records", "held_out", 100_000) for pair in sentences(one.text)]
    for pair in pairs:
        by_task[pair.task].append(pair.source)
    chosen = {task: rng.sample(sorted(set(sources)), count) for task, sources in by_task.items()}
    rows = [{"domain": task, "text": chosen[task][row]} for row in range(count) for task in TASKS]
    write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    write_prompts(80, Path(sys.argv[1]) / PROMPTS)
    write_sources(60, Path(sys.argv[1]) / SOURCES)
