"""A text that ended in an error is no sample: whoever asks an engine for texts says so."""

from pathlib import Path

import pytest
import torch

from cotrain.cli import main
from cotrain.errors import UserError
from cotrain.rollout.samplers import Own
from inference import Engine, Sampling
from inference.exactness.checks import check_coupled
from inference.measure.real_costs import measure_rounds
from inference.measure.timing import engine_arm
from inference.policy import Fixed
from inference.proposers import Independent
from tests.cotrain.commands.test_cli import saved
from tests.tiny import tiny

PROMPTS = [[3, 5], [9, 30, 2], [4]]
SAID = "logits are NaN"


def broken(**settings: object) -> Engine:
    """Whatever follows id 30, its target knows nothing."""
    model = tiny()
    with torch.no_grad():
        model.get_input_embeddings().weight[30] = torch.nan
    return Engine(model, **settings)  # type: ignore[arg-type]


def test_what_is_timed_is_whole() -> None:
    with pytest.raises(RuntimeError, match=f"prompt 1: .*{SAID}"):
        engine_arm("plain", broken(), Sampling(), 4).run(PROMPTS, [1, 2, 3], 0)
    with pytest.raises(RuntimeError, match=f"prompt 1: .*{SAID}"):
        measure_rounds({0: broken(rows=3)}, PROMPTS, sampling=Sampling(), max_new_tokens=4)


def test_a_text_that_is_compared_is_whole() -> None:
    """What it has of tokens is as plain decoding has it, so it would be equal."""
    engine = broken(proposer=Independent(tiny(seed=1)), policy=Fixed(2))
    with pytest.raises(RuntimeError, match=f"prompt 1: .*{SAID}"):
        check_coupled(engine, PROMPTS, [1, 2, 3], Sampling(), 4, 0, 1.0)


def test_a_sampled_text_is_whole() -> None:
    with pytest.raises(UserError, match=f"continue a prompt, .*{SAID}"):
        Own(broken())(PROMPTS, Sampling(), 4, 0, [1, 2, 3])


def test_generate_names_the_prompt_after_all_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = saved(tmp_path / "target")
    engine = Engine(str(target))
    assert engine.tokenizer is not None
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
    assert printed.out and f"the text of prompt 2 ends early, after 2 tokens: the target's {SAID}" in printed.err
