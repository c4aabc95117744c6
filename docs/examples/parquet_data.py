"""Own prompts from a parquet file, by domain: a column of texts, and one that says where each is from.

    python docs/examples/parquet_data.py [key=value ...]

jsonl, csv, compressed files, globs and folders of them are read alike.
"""

import sys
from pathlib import Path

import datasets
from small_target import SIZES, cotrain, sentences, target

place = Path("outputs/examples/parquet")
place.mkdir(parents=True, exist_ok=True)

texts = sentences(400)
model = target(place / "target", texts)
rows = {"note": texts, "domain": ["letters" if number % 2 else "stories" for number in range(len(texts))]}
datasets.Dataset.from_dict(rows).to_parquet(place / "prompts.parquet")

cotrain(
    "train",
    f"target.path={model}",
    f"data.path={place / 'prompts.parquet'}",
    "data.column=note",
    f"output={place / 'run'}",
    *SIZES,
    "overwrite=true",
    *sys.argv[1:],
)
cotrain("report", f"run={place / 'run'}")  # the page again, with acceptance by domain
