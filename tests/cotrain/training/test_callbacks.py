"""Measured checkpoints, patience, curves and held-out points."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

from cotrain.board import tags
from cotrain.losses import divergences as losses
from cotrain.losses.spec import LossSpec
from cotrain.students.base import LAST
from cotrain.training.callbacks import HeldOutPoints, Learning, MeasuredCheckpoint, MeasureSpeed, part_of
from cotrain.training.module import Stage
from cotrain.training.progress import Progress
from tests.cotrain.evaluation.test_held_out import LENGTH, PROMPT, N, parts
from tests.cotrain.training.test_module import loader, module_of, trainer
from tests.tiny import tiny


def test_speed_is_measured_at_validations_and_survives_a_checkpoint(tmp_path: Path) -> None:
    speeds, taus = iter([1.2, 1.4]), iter([2.0, 1.8])
    speed = MeasureSpeed(
        lambda draft: {"speedup": next(speeds) + torch.is_inference_mode_enabled()},
        lambda: next(taus),
        tmp_path / "one",
    )
    with pytest.raises(ValueError, match="trainer.steps"):
        speed.best()
    small = tiny(layers=1, seed=3)
    module = module_of(tiny(), small, [Stage(1.0, LossSpec(losses.kl))], steps=2)
    run = trainer(tmp_path, 2, speed)
    run.validate(module, DataLoader([0]), verbose=False)
    run.fit(module, loader(), DataLoader([0]))
    assert speed.best() == MeasuredCheckpoint(
        0, tmp_path / "one" / "step-0", 1.2, 2.0
    )  # a clock on few prompts does not rank
    saved = LlamaForCausalLM.from_pretrained(speed.checkpoints[1].path)
    assert all(torch.equal(value, small.state_dict()[name]) for name, value in saved.state_dict().items())
    other = MeasureSpeed(lambda draft: {}, lambda: 0.0, tmp_path / "moved")
    other.load_state_dict(speed.state_dict())
    moved = tmp_path / "moved"
    assert other.checkpoints == [
        MeasuredCheckpoint(0, moved / "step-0", 1.2, 2.0),
        MeasuredCheckpoint(2, moved / "step-2", 1.4, 1.8),
    ]


def test_training_ends_when_tau_no_longer_rises(tmp_path: Path) -> None:
    taus = [2.0, 2.5, 2.4, 2.6, 2.6, 2.5]
    speed = MeasureSpeed(lambda draft: {"speedup": 1.0}, lambda: taus[len(speed.checkpoints)], tmp_path, patience=2)
    alone = SimpleNamespace(barrier=lambda: None)
    run: Any = SimpleNamespace(
        logger=None, loggers=[], global_step=0, should_stop=False, is_global_zero=True, strategy=alone
    )
    ends = []
    for run.global_step in range(6):
        speed.on_validation_end(run, SimpleNamespace(assembled=lambda: nullcontext(tiny(layers=1))))
        ends.append(run.should_stop)
    assert ends == [False] * 5 + [True] and speed.best().step == 3


def test_speed_of_a_resumed_training_is_of_what_it_did_since() -> None:
    """The clock goes on where it stopped; padding and prompts are no tokens that are learnt from."""
    learning, logged = Learning(Progress(20, elapsed=1000.0)), list[dict[str, float]]()
    logger = SimpleNamespace(log_metrics=lambda values, step: logged.append(values))
    trainer: Any = SimpleNamespace(loggers=[logger], global_step=5, world_size=1)
    module: Any = SimpleNamespace(
        draft=nn.Linear(1, 1), device=torch.device("cpu"), step_figures={"loss": 1.0}, watched=True
    )
    learning.on_train_start(trainer, module)
    for tokens in (6, 3):
        learning.progress.elapsed += 2
        predicted = torch.arange(12).view(2, 6) < tokens
        part = {"predicted": predicted, "ids": torch.zeros(2, 7), "sampled": predicted}
        learning.on_train_batch_end(trainer, module, None, part, 0)
    assert [one[tags.TOKENS_PER_SECOND] for one in logged] == [3.0, 1.5]


def test_the_cost_of_held_out_points_is_restored_from_a_checkpoint() -> None:
    one, two = (HeldOutPoints(SimpleNamespace(texts=[1, 2]), SimpleNamespace(progress=Progress(9, elapsed=100.0)),  # type: ignore[arg-type]
                              [], 3, "greedy", "block") for _ in range(2))  # fmt: skip
    one.count, one.seconds, one.last = 4, 2.5, 0.5
    two.load_state_dict(one.state_dict())
    assert (two.count, two.seconds, two.last) == (4, 2.5, 0.5) and two.served == (3, "greedy", "block")
    assert (
        two.line()
        == "held-out acceptance between validations: 4 points of 2 texts, 2.5 s, 2.5% of the time of training"
    )


def test_the_number_of_texts_of_a_point_follows_from_its_budget() -> None:
    """24 points over a tenth of the training's tokens; a text has (8 + 11 + 1 + 7 + 1) / 5 sampled ones."""
    held = parts()[0]
    each = sum(length - prompt for length, prompt in zip(LENGTH, PROMPT, strict=True)) / N
    for count in (1, 2, 5):
        part = part_of(held, 24 * (count + 0.5) * each / 0.1)
        assert len(part.texts) == {1: 1, 2: 2, 5: 5}[count] and len(part.states[LAST]) == len(part.texts)
    assert len(part_of(held, 0).texts) == 1 and len(part_of(held, 1e12).texts) == 5
    two = part_of(held, 24 * 2.5 * each / 0.1)  # the first of each domain
    assert torch.equal(two.texts.ids, held.texts.ids[[0, 1]]) and torch.equal(
        two.states[LAST], held.states[LAST][[0, 1]]
    )
    assert (two.temperature, two.truncate) == (held.temperature, held.truncate)
