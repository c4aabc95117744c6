"""Rates of a training beside their floors, of a tiny target."""

import json
from pathlib import Path

from cotrain.cli import main
from studies import training_rates
from tests.folders import own_texts, target_folder


def test_the_report(tmp_path: Path) -> None:
    folder, own, texts = target_folder(tmp_path / "target"), own_texts(tmp_path / "own.jsonl"), tmp_path / "texts"
    main(
        [
            "rollout",
            f"target.path={folder}",
            f"data.path={own}",
            "kind=train",
            "regime=t1",
            f"output={texts}",
            "rollout.texts=6",
            "rollout.held_out_texts=3",
            "rollout.new_tokens=20",
        ]
    )
    drafts = ["init.layers=[0]", "init.layers=[0] draft.vocabulary=20"]
    words = [
        str(tmp_path / "out.json"),
        str(folder),
        str(texts / "train_T1.parquet"),
        "--rows",
        "1,2",
        "--new-tokens",
        "4",
        "--repeats",
        "1",
    ]
    training_rates.main([*words, *(part for draft in drafts for part in ("--draft", draft))])
    report = json.loads((tmp_path / "out.json").read_text())
    assert [one["rows"] for one in report["sampling"]] == [1, 2] and list(report["learning"]) == drafts
    whole, pruned = (report["learning"][draft] for draft in drafts)
    assert whole["weights"] > pruned["weights"] and whole["floor"] < pruned["floor"]
    assert whole["tokens"] == 2 * 20
    for one in (*report["sampling"], report["reading"], *report["learning"].values()):
        assert one["tokens_per_second"] > 0 and one["floor"] > 0
