"""Trainer presets: what each asks of a machine, and what a machine without it answers."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy

from cotrain.cli import main
from cotrain.errors import UserError
from cotrain.training import fit, preconditions
from tests.cotrain.training.test_preconditions import command
from tests.settings import composed


def test_a_preset_changes_only_settings_of_its_machine() -> None:
    cpu = composed().trainer
    gpu, ddp, fsdp2 = (composed(f"trainer={name}").trainer for name in ("gpu", "ddp", "fsdp2"))
    changed = [{key for key, value in one if getattr(cpu, key) != value} for one in (gpu, ddp, fsdp2)]
    several = {"batch", "devices", "strategy"}
    assert changed == [{"accelerator", "batch", "precision", "remember_mb"}, several, several]
    assert (gpu.accelerator, gpu.precision, gpu.devices, gpu.threads) == ("gpu", "bf16-mixed", 1, 0)
    assert gpu.batch > cpu.batch and {ddp.batch % n for n in (2, 4, 8)} == {0}
    assert fit.strategy_of(ddp) == "ddp" and isinstance(fit.strategy_of(fsdp2), ModelParallelStrategy)


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_presets_of_several_processes_run_without_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cfg = composed(f"trainer={name}", "trainer.devices=2")
    preconditions.refuse_training(cfg)
    preconditions.machine(cfg.trainer)


def test_check_and_run_reject_a_missing_gpu_alike(
    mistakes: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for way in ("check=true", "check=false"):
        assert main(command(mistakes, "trainer=gpu", way)) == 1
        said = capsys.readouterr().err
        assert (
            said.startswith("cotrain train: trainer.accelerator=gpu: this machine has no GPU") and said.count("\n") == 1
        )
    assert not (mistakes / "out").exists()


def test_more_processes_than_gpus_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    preconditions.machine(composed("trainer=gpu").trainer)
    with pytest.raises(
        UserError, match="^trainer.devices=2: each process needs a GPU, and this machine has 1: set trainer.devices=1$"
    ):
        preconditions.machine(composed("trainer=ddp").trainer)
