"""Puts a later measurement of a draft into its folder, in the place of the one that it was written with.

    cotrain bench draft.path=data/drafts/smollm2 output=outputs/again
    python -m studies.measured_again data/drafts/smollm2 outputs/again/report.json

The folder's report is then that of `cotrain bench`, with the older report's figures of the training; draft length and
tree are those that it planned. Weights, tokenizer, prompts, and where and when it was trained stay as they are.
"""

import json
import sys
from pathlib import Path

from cotrain.planning.planner import served_tree
from inference.drafts.draft_folder import REPORT, changed, describe, digest, read

TRAINING = ("held_out", "checkpoints", "exported_step", "profiles", "divergence", "training", "given_texts")


def main(folder: Path, later: Path) -> None:
    metadata, own = read(folder).metadata, folder / REPORT
    assert metadata is not None, f"{folder} was not written by cotrain"
    old, report = (json.loads(file.read_text(encoding="utf-8")) for file in (own, later))
    assert report["extra"]["kind"] == metadata.kind, "the later report is of another draft"
    report["extra"] |= {key: old["extra"][key] for key in TRAINING}
    own.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    planned = {"k": report["extra"]["planned_k"], "tree": served_tree(report["extra"])}
    origin = {**metadata.origin, "advice": report["extra"]["advice"]}
    describe(folder, changed(metadata, report=digest(own), origin=origin, **planned))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
