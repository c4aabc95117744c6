"""A draft for a target that is served in 4 bits: it learns from, and is measured with, the rounded weights.

    python docs/examples/quantised_target.py [key=value ...]

`quantisation=int8` does the same for 8 bits. On a CPU acceptance is as on a GPU, the speeds are not: a warning says so.
"""

import sys
from pathlib import Path

from small_target import SIZES, cotrain, jsonl, sentences, target

place = Path("outputs/examples/quantised")
place.mkdir(parents=True, exist_ok=True)

texts = sentences(400)
model = target(place / "target", texts)
prompts = jsonl(place / "prompts.jsonl", [{"text": text} for text in texts])

cotrain(
    "train",
    f"target.path={model}",
    f"data.path={prompts}",
    "quantisation=nf4",
    f"output={place / 'run'}",
    *SIZES,
    "overwrite=true",
    *sys.argv[1:],
)
