"""The moving average of the weights: when it is judged, how it begins, and that it is exported."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn

from cotrain.bench import measurement
from cotrain.training.callbacks import Averaged
from tests.cotrain.commands.test_train import job, place, run, same, weights  # noqa: F401 - fixtures


def test_the_average_is_shown_while_it_is_judged() -> None:
    draft = torch.nn.Linear(1, 1, bias=False)
    weight, module = draft.weight.data, SimpleNamespace(draft=draft)
    trainer: Any = SimpleNamespace(global_step=0, state=SimpleNamespace(fn=TrainerFn.FITTING))
    averaged = Averaged(0.75)
    weight.fill_(4.0)
    averaged.on_fit_start(trainer, module)
    averaged.on_train_start(trainer, module)
    for step, value in ((1, 8.0), (1, 99.0), (2, 0.0)):  # the second batch ends no step
        trainer.global_step = step
        weight.fill_(value)
        averaged.on_train_batch_end(trainer, module)
    averaged.on_validation_start(trainer, module)
    wanted = pytest.approx((4 * 2 / 11 + 8 * 9 / 11) * 0.25, rel=1e-6)  # steps 1 and 2 leave 2 / 11 and 3 / 12 of it
    assert weight.item() == wanted
    averaged.on_validation_end(trainer, module)
    assert weight.item() == 0.0
    kept = copy.deepcopy(averaged.state_dict())
    averaged.show(module)
    averaged.on_validation_start(trainer, module)  # of a validation behind the last step
    trainer.state.fn = TrainerFn.VALIDATING
    averaged.on_validation_end(trainer, module)
    assert weight.item() == wanted
    again = Averaged(0.75)
    again.load_state_dict(kept)
    weight.fill_(0.0)
    again.on_fit_start(trainer, module)
    again.on_train_start(trainer, module)  # a batch that ends no step does not count
    again.on_train_batch_end(trainer, module)
    again.show(module)
    assert weight.item() == wanted


def test_the_average_of_a_short_run_is_near_its_last_weights() -> None:
    """However long the average is asked to be: weights that go from 0 to 1 in 50 steps, and stay there for 1,000."""
    draft = torch.nn.Linear(1, 1, bias=False)
    trainer, module = SimpleNamespace(global_step=0), SimpleNamespace(draft=draft)
    averaged = Averaged(0.999)
    draft.weight.data.fill_(0.0)
    averaged.on_fit_start(trainer, module)  # type: ignore[arg-type]
    averaged.on_train_start(trainer, module)  # type: ignore[arg-type]
    for step in range(1, 1051):
        trainer.global_step = step
        draft.weight.data.fill_(min(step / 50, 1.0))
        averaged.on_train_batch_end(trainer, module)  # type: ignore[arg-type]
        if step == 50:
            assert averaged.average[0].item() > 0.8
    assert averaged.average[0].item() > 0.99


@pytest.mark.thorough
def test_an_averaged_run_resumes_and_exports_its_average(
    place: Path,  # noqa: F811
    run: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []

    def quick(plan: object, k: int) -> dict[str, float]:
        calls.append(k)
        if len(calls) == 7:
            raise OSError("the machine went down at step 4")
        return {"speedup": 1.0}

    monkeypatch.setattr(measurement, "quick", quick)
    settings = ("trainer.ema=0.9", "rollout.temperatures=[1.0]")
    assert job(place, "averaged", *settings) == 0
    assert job(place, "went down", *settings) == 1 and job(place, "went down", *settings) == 0
    for step in (2, 4, 5):
        one, two = weights(place / "averaged", step), weights(place / "went down", step)
        assert same(one, two) and not same(one, weights(run, step))
