"""Settings that failed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cotrain.cli import main
from cotrain.errors import UserError
from cotrain.training.callbacks import FIRST, StandingWeights
from cotrain.training.optim import HALVES, precision
from tests.cases import case
from tests.cotrain.training.conftest import mistakes as mistakes  # a fixture: a folder with a target and texts
from tests.cotrain.training.test_preconditions import command


@case("bf16 weights that stand still")
@pytest.mark.parametrize("name", ["bf16-true", "16-true", "transformer-engine", "transformer-engine-float16"])
def test_weights_in_half_precision_are_refused_with_the_precision_to_take(name: str) -> None:
    with pytest.raises(UserError, match=rf"^pretraining.precision={name}: .*=auto or {HALVES[name]}, .* float32$"):
        precision(name, key="pretraining.precision")
    assert precision(HALVES[name]) == HALVES[name]


@pytest.mark.parametrize(
    ("dtype", "rate", "shown"),
    [
        (
            torch.bfloat16,
            1e-5,
            "1.0e-05",
        ),
        (torch.float32, 1e-9, "1.0e-09"),
        (torch.float32, 1e-5, ""),
    ],
)
def test_weights_that_stand_still_are_said_whatever_the_precision(
    dtype: torch.dtype, rate: float, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Embeddings of tokens that no text has do not count: here nine in ten."""
    torch.manual_seed(0)
    draft = nn.Embedding(100, 64, dtype=dtype)
    optimizer = torch.optim.AdamW(draft.parameters(), rate, weight_decay=0.0)
    strategy = SimpleNamespace(reduce=lambda counts, reduce_op: counts)
    trainer: Any = SimpleNamespace(global_step=3, strategy=strategy, optimizers=[optimizer])
    module: Any = SimpleNamespace(draft=draft, device=torch.device("cpu"))
    movement = StandingWeights()
    movement.on_train_start(trainer, module)
    for _ in range(2 * FIRST):
        optimizer.zero_grad()
        draft(torch.arange(10)).square().sum().backward()
        movement.on_before_optimizer_step(trainer, module, optimizer)
        optimizer.step()
        trainer.global_step += 1
        movement.on_train_batch_end(trainer, module)
    said = capsys.readouterr().err
    assert said.count("\n") == bool(shown)
    if shown:
        where = f"at the learning rate {shown}"
        assert said.startswith(f"after 20 steps only 0% of the draft's weights have moved: {where}")


def test_a_run_says_that_weights_stand_still(mistakes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = "measure=false trainer.steps=20 trainer.validations=1 optimizer.lr=1e-12"
    assert main(command(mistakes, *settings.split())) == 0
    assert capsys.readouterr().err.count("of the draft's weights have moved") == 1
