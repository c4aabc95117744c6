"""Which loss gives the higher tau: a sweep of two losses and two seeds, and their paired intervals.

    python docs/examples/sweep.py [key=value ...]

The runs share the target's texts (`rollout.folder=`) and are judged on the same held-out ones; none is timed
(`measure=false`).
"""

import sys
from pathlib import Path

from small_target import SIZES, cotrain, jsonl, sentences, target

place = Path("outputs/examples/sweep")
place.mkdir(parents=True, exist_ok=True)

texts = sentences(400)
model = target(place / "target", texts)
prompts = jsonl(place / "prompts.jsonl", [{"text": text} for text in texts])

cotrain(
    "train",
    f"target.path={model}",
    f"data.path={prompts}",
    f"output={place / 'runs'}",
    "measure=false",
    f"rollout.folder={place / 'texts'}",
    *SIZES,
    "overwrite=true",
    *sys.argv[1:],
    "-m",
    "loss=kl,kl_then_tv",
    "trainer.seed=0,1",
)
cotrain("compare", f"folder={place / 'runs'}", "baseline=loss=kl", f"report={place / 'compared.json'}")
