"""Rounds of sample, train, swap the draft; and what several processes learn from."""

import copy
import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import PreTrainedModel

from cotrain.bench import measurement
from cotrain.data.prompt_rows import PromptRows
from cotrain.rollout.samplers import Ask, Faster
from cotrain.rollout.training_texts import Sampled, Share
from cotrain.training import fit
from cotrain.training.callbacks import Averaged
from cotrain.training.fit import TrainingPhase, phases_of
from inference import Sampling
from tests.cotrain.commands.test_train import job, place, run, same, weights  # noqa: F401 - fixtures
from tests.folders import network, tokenizer


def settings(steps: int, phases: int, url: str | None = None) -> Any:
    trainer, rollout = SimpleNamespace(steps=steps), SimpleNamespace(rounds=phases, url=url)
    return SimpleNamespace(trainer=trainer, rollout=rollout, data=SimpleNamespace(on_target=False))


def test_legs_end_at_validations() -> None:
    assert phases_of(settings(10, 1), 3) == [TrainingPhase(0, 0, 10)]
    assert phases_of(settings(10, 2), 3) == [TrainingPhase(0, 0, 6), TrainingPhase(1, 6, 10)]
    assert phases_of(settings(9, 3), 3) == [TrainingPhase(0, 0, 3), TrainingPhase(1, 3, 6), TrainingPhase(2, 6, 9)]
    for wrong in (0, 5):
        with pytest.raises(
            ValueError, match=f"rollout.rounds={wrong}: each round ends at a validation, and there are 4: set"
        ):
            phases_of(settings(10, wrong), 3)
    with pytest.raises(ValueError, match="rollout.rounds=.*: this engine samples no texts"):
        phases_of(settings(10, 2, url="http://server"), 3)


class Slow:
    """A sampler that takes its time and says who it is."""

    rows = 4

    def __init__(self, token: int, seconds: float) -> None:
        self.token, self.seconds = token, seconds

    def __call__(self, prompts: list[list[int]], *_: object) -> list[list[int]]:
        time.sleep(self.seconds)
        return [[self.token]] * len(prompts)


def test_the_faster_sampler_goes_on() -> None:
    faster = Faster({"plain": Slow(1, 0.02), "draft": Slow(2, 0.001)})
    made = [faster([[0]], Sampling(), 1, 0, [0])[0][0] for _ in range(8)]
    assert made == [1, 1, 2, 2, 2, 2, 2, 2]  # each once to warm up and once against the clock
    assert faster.rows == 4 and faster.speeds["draft"] > faster.speeds["plain"] > 0


PROMPTS = PromptRows(
    [{"domain": "ab"[i % 2], "prompt": list(range(8 * i + 2, 8 * i + 6)), "completion": []} for i in range(12)]
)


def test_the_rounds_of_a_set_are_the_set(tmp_path: Path) -> None:
    whole = Sampled(network(), tokenizer(), tmp_path / "whole", Ask({"train": 5}, 4, 6), 4, 1, {"train": "own"})
    parted, regime = replace(whole, folder=tmp_path / "parts"), Sampling(1.0)
    rows = [
        datasets.Dataset.from_parquet(f"{path}.parquet").to_list()
        for path in (
            whole.sample("train", regime, PROMPTS, lambda _: None),
            *(parted.sample("train", regime, PROMPTS, lambda _: None, Share(i, 2)) for i in range(2)),
        )
    ]
    assert [rows[1][i // 2] if i % 2 == 0 else rows[2][i // 2] for i in range(10)] == rows[0]
    assert {row["domain"] for row in rows[1]} == {"a", "b"}
    assert json.loads((tmp_path / "parts" / "train_T1_2of2.json").read_text())["part"] == [1, 2]


ROUNDS = ("rollout.rounds=2", "rollout.texts=16", "trainer.steps=4", "rollout.rows=2", "trainer.corpus_steps=1")


@pytest.mark.thorough
def test_rounds_sample_with_the_draft_that_learns(place: Path) -> None:  # noqa: F811
    assert job(place, "rounds", *ROUNDS, "rollout.temperatures=[1.0]") == 0
    made = sorted(path.name for path in (place / "rounds" / "rollouts").glob("train*.parquet"))
    assert made == ["train_T1_1of2.parquet", "train_T1_2of2.parquet"]
    assert (place / "rounds" / "draft" / "report.json").exists()
    events = EventAccumulator(str(place / "rounds" / "tensorboard" / "rounds"))
    events.Reload()
    for name in ("plain", "with the draft"):
        assert [(event.step, event.value > 0) for event in events.Scalars(f"7_rollout/{name}")] == [(2, True)]


def test_a_run_that_stopped_before_its_second_round_samples_with_what_it_had_learnt(
    place: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    met: list[dict[str, torch.Tensor]] = []

    def noted(job: Any, draft: PreTrainedModel, swapped: Any = fit.swapped) -> Faster:
        met.append({name: value.clone() for name, value in draft.state_dict().items()})
        if len(met) == 1:
            raise OSError("the machine went down")
        return swapped(job, draft)

    monkeypatch.setattr(fit, "swapped", noted)
    monkeypatch.setattr(measurement, "quick", lambda plan, k: {"speedup": 1.0})
    settings = (*ROUNDS, "measure=false", "rollout.temperatures=[1.0]")
    assert job(place, "stopped", *settings) == 1 and job(place, "stopped", *settings) == 0
    assert same(*met)


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
