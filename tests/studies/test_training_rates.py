"""Rates of a training beside their floors, of a tiny target."""

import json
from pathlib import Path

import pytest
import torch

from cotrain.cli import main
from studies import training_rates
from studies.training_rates import learning, module_of
from tests.folders import own_texts, target_folder


def test_the_report(tmp_path: Path) -> None:
    folder, own, texts = target_folder(tmp_path / "target"), own_texts(tmp_path / "own.jsonl"), tmp_path / "texts"
    main(["rollout", f"target.path={folder}", f"data.path={own}", "kind=train", "regime=t1", f"output={texts}",
          "rollout.texts=6", "rollout.held_out_texts=3", "rollout.new_tokens=20"])  # fmt: skip
    drafts = ["init.layers=[0]", "init.layers=[0] draft.vocabulary=20"]
    words = [str(tmp_path / "out.json"), str(folder), str(texts / "train_T1.parquet"), "--rows", "1,2",
             "--new-tokens", "4", "--repeats", "1"]  # fmt: skip
    training_rates.main([*words, *(part for draft in drafts for part in ("--draft", draft))])
    report = json.loads((tmp_path / "out.json").read_text())
    assert [one["rows"] for one in report["sampling"]] == [1, 2] and list(report["learning"]) == drafts
    whole, pruned = (report["learning"][draft] for draft in drafts)
    assert whole["weights"] > pruned["weights"] and whole["floor"] < pruned["floor"]
    assert whole["tokens"] == 2 * 20
    for one in (*report["sampling"], report["reading"], *report["learning"].values()):
        assert one["tokens_per_second"] > 0 and one["floor"] > 0


def test_steps_learn_and_tied_heads_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of a floor are those that multiply states; a step moves them."""
    training_rates.register()
    folder = target_folder(tmp_path / "target")
    cfg = training_rates.config([f"target.path={folder}", "init.layers=[0]"])
    target, tokenizer = training_rates.models(cfg)
    batch = {"ids": torch.randint(50, (2, 12)), "predicted": torch.ones(2, 11, dtype=torch.bool),
             "key": torch.arange(2), "temperature": torch.ones(2)}  # fmt: skip
    module = module_of(cfg, target, len(tokenizer), None)  # type: ignore[arg-type]
    before = [one.detach().clone() for one in module.draft.parameters()]
    machine = training_rates.Machine(1e9, 6.0 * 10**6)
    found = learning(module, batch, 0.0, machine, 1)
    assert found["weights"] == sum(one.numel() for one in module.draft.parameters())  # tied: the table is the head
    assert found["floor"] == pytest.approx(1e6 / found["weights"]) and found["tokens"] == 22
    assert all(not torch.equal(one, other) for one, other in zip(before, module.draft.parameters(), strict=True))
