"""Cases of data."""

import json
from pathlib import Path

import pytest

from cotrain.cli import main
from cotrain.evaluation.comparison import FIGURES
from tests.cases import FILES, case
from tests.folders import target_folder

SHORT = """rollout.texts=8 rollout.held_out_texts=2 rollout.prompt_tokens=32 rollout.temperatures=[1.0] measure=false
trainer.steps=2 trainer.batch=2 trainer.validations=1 policy.k=2 init=scratch""".split()


@pytest.mark.parametrize(
    "settings",
    ["draft=block draft.head_dim=64 loss=calls rollout.new_tokens=1",
     "draft=medusa loss=calls_block data.on_target=true rollout.new_tokens=8",
     "draft=early_exit draft.layers=1 draft.rank=2 loss=calls_tv rollout.new_tokens=2"],
)  # fmt: skip
@case("short answers")
def test_answers_of_one_and_two_tokens_are_learnt_and_judged(settings: str, tmp_path: Path) -> None:
    paths = [f"target.path={target_folder(tmp_path / 'target')}", f"data.path={FILES / 'short_answers.jsonl'}",
             f"output={tmp_path / 'out'}"]  # fmt: skip
    assert main(["train", *paths, *SHORT, *settings.split()]) == 0
    tau = json.loads((tmp_path / "out" / FIGURES).read_text())["tau"]
    assert tau == 1 if settings.endswith("new_tokens=1") else tau >= 1  # a text of one token takes one call
