"""Survivors of a fifth round of planted bugs: prompts of files, cuts in training, parts of a loss of several depths."""

import math
from pathlib import Path

import pytest
import torch

from cotrain.cli import main
from cotrain.config.groups import Regime
from cotrain.config.regimes import sampling, truncation
from cotrain.losses.spec import parse
from cotrain.training.step_loss import StepLoss
from inference import Engine, Sampling
from inference.measure.arms import transformers_arm
from inference.sampling import probs
from tests.cotrain.commands.test_cli import saved
from tests.tiny import tiny


def test_prompts_of_a_file_keep_their_spaces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, prompts = saved(tmp_path / "target"), ["    return x", "a = 1  "]
    (tmp_path / "prompts").write_text("\n".join([prompts[0], "", "   ", prompts[1]]))
    settings = {"max_new_tokens": 6, "sampling": Sampling(temperature=0.0)}
    plain = Engine(str(target)).generate(prompts, **settings).text  # type: ignore[arg-type]
    other = Engine(str(target)).generate([one.strip() for one in prompts], **settings).text  # type: ignore[arg-type]
    capsys.readouterr()
    arguments = [f"target.path={target}", f"prompts={tmp_path / 'prompts'}", "max_new_tokens=6", "regime=t0"]
    assert main(["generate", *arguments]) == 0
    assert capsys.readouterr().out == "".join(f"{one}\n" for one in plain) and plain != other


def test_rows_of_one_noise_keep_their_own_settings() -> None:
    """The second text enters where the first one stood, under the same id."""
    engine, both = Engine(tiny(), rows=1), [Sampling(0.3), Sampling(1.7, repetition_penalty=1.5)]
    together = engine.generate([[3, 5], [3, 5]], max_new_tokens=12, sampling=both, ids=[7, 7], ignore_eos=True).tokens
    alone = [engine.generate([[3, 5]], max_new_tokens=12, sampling=one, ids=[7], ignore_eos=True).tokens[0]
             for one in both]  # fmt: skip
    assert together == alone and alone[0] != alone[1]


@pytest.mark.parametrize(("k", "p"), [(5, 0.7), (5, 1.0), (0, 0.7)])
def test_training_cuts_distributions_as_the_engine_does(k: int, p: float) -> None:
    """Top-k first: top-p of what is left keeps fewer tokens than of the whole distribution."""
    logits = torch.randn(50, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    regime = Regime(1.0, k, p)
    cut = truncation(regime)
    assert cut is not None
    torch.testing.assert_close(cut(logits).softmax(-1), probs(logits, sampling(regime)).double(), atol=1e-6, rtol=0)
    kept = (cut(logits) > -math.inf).sum(-1)
    assert kept.min() < kept.max() or p == 1


def test_transformers_samples_from_the_whole_distribution() -> None:
    """Its own default keeps the 50 likeliest tokens, of 256 here, where no cut was asked for."""
    model = tiny(256)
    found = transformers_arm("hf", model, Sampling(temperature=50.0), 40).run([[3, 5]], [], 0)
    (new,) = found.tokens
    with torch.no_grad():
        logits = model(torch.tensor([[3, 5, *new]])).logits[0, 1:-1]
    ranks = (logits > logits.gather(1, torch.tensor(new).unsqueeze(1))).sum(1)
    assert len(new) == 40 and ranks.max() > 200 and (ranks >= 50).sum() > 20


class Asked:
    """Of guess g at each position a loss of g and terms of g and 10 g."""

    ids = torch.zeros(1, 3, dtype=torch.int64)

    def of_places(self, spec: object, guess: int, *_: object) -> tuple[torch.Tensor, "Found"]:
        return torch.tensor(float(11 * guess)), Found(torch.tensor([1.0 * guess, 10.0 * guess]))


class Found:
    def __init__(self, terms: torch.Tensor) -> None:
        self.terms = terms


def test_parts_of_a_loss_are_weighed_as_the_loss_is() -> None:
    """They are what it is the sum of, at every depth with its share."""

    class Counts:
        positions = torch.tensor(2.0)

    loss = StepLoss(parse("kl+tv"), Asked(), [1, 2, 3], None, Counts(), 3, 1.0)  # type: ignore[arg-type]
    share = torch.tensor([0.5, 0.25, 0.125])
    found = loss.of_places(torch.ones(1, 2, dtype=torch.bool), share, torch.zeros(1, 3), True)
    weighed = 0.5 * 1 + 0.25 * 2 + 0.125 * 3
    assert float(found.mean) == pytest.approx(11 * weighed / 2)
    assert {name: float(part) for name, part in found.terms.items()} == pytest.approx(
        {"kl": weighed / 2, "tv": 10 * weighed / 2}
    )
