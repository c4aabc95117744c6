"""Measured checkpoints, patience, curves and held-out points."""

import ctypes
import resource
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
from cotrain.training import callbacks
from cotrain.training.callbacks import Learning, MeasuredCheckpoint, MeasureSpeed, ReturnedMemory
from cotrain.training.module import Stage
from cotrain.training.progress import Progress
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


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_freed_memory_is_given_back_while_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks below the size that the C library maps by itself, of which the last one stays."""
    monkeypatch.setattr(callbacks, "TRIM", 0.0)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 2**20

    blocks = [bytearray(2**16) for _ in range(4096)]
    del blocks[:-1]
    before = resident()
    ReturnedMemory().on_train_batch_end()
    assert before - resident() > 128


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
