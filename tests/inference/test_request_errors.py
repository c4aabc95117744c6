"""A text that ended in an error is no sample: callers of an engine raise for it."""

from pathlib import Path

import pytest
import torch

from cotrain.cli import main
from cotrain.errors import UserError
from cotrain.rollout.samplers import Own
from inference import Engine, Sampling
from inference.exactness.ties import check_coupled
from inference.measure.arms import engine_arm
from inference.measure.costs import measure_rounds
from inference.policy import Fixed
from inference.proposers import Independent
from tests.cotrain.commands.test_cli import saved
from tests.tiny import tiny

PROMPTS = [[3, 5], [9, 30, 2], [4]]
MESSAGE = "logits are NaN"


def broken(**settings: object) -> Engine:
    """An engine whose target has no logits after id 30."""
    model = tiny()
    with torch.no_grad():
        model.get_input_embeddings().weight[30] = torch.nan
    return Engine(model, **settings)  # type: ignore[arg-type]


def test_timing_raises_for_a_text_with_an_error() -> None:
    with pytest.raises(RuntimeError, match=f"prompt 1: .*{MESSAGE}"):
        engine_arm("plain", broken(), Sampling(), 4).run(PROMPTS, [1, 2, 3], 0)
    with pytest.raises(RuntimeError, match=f"prompt 1: .*{MESSAGE}"):
        measure_rounds({0: (broken(rows=3), 0)}, PROMPTS, sampling=Sampling(), max_new_tokens=4)


def test_comparison_raises_for_a_text_with_an_error() -> None:
    """Its tokens so far are those of plain decoding, so the comparison alone would pass."""
    engine = broken(proposer=Independent(tiny(seed=1)), policy=Fixed(2))
    with pytest.raises(RuntimeError, match=f"prompt 1: .*{MESSAGE}"):
        check_coupled(engine, PROMPTS, [1, 2, 3], Sampling(), 4, 0, 1.0)


def test_sampling_raises_for_a_text_with_an_error() -> None:
    with pytest.raises(UserError, match=f"continue a prompt, .*{MESSAGE}"):
        Own(broken())(PROMPTS, Sampling(), 4, 0, [1, 2, 3])


def test_generate_names_the_prompt_after_all_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = saved(tmp_path / "target")
    engine = Engine(str(target))
    wrong = engine.tokenizer("q")["input_ids"]
    with torch.no_grad():
        engine.target.model.get_input_embeddings().weight[wrong] = torch.nan
    monkeypatch.setattr("cotrain.commands.generate._engine", lambda cfg: engine)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("ab\nqa\ncd\n")
    arguments = ["draft.path=null", f"target.path={target}", f"prompts={prompts}", "max_new_tokens=2", "color=false"]
    capsys.readouterr()
    assert main(["generate", *arguments]) == 1
    printed = capsys.readouterr()
    assert printed.out and f"the text of prompt 2 ends early, after 2 tokens: the target's {MESSAGE}" in printed.err
