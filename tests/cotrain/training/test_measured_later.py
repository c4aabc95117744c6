"""A training that was not measured (measure=false) is measured later: the draft is what its last checkpoint says,
whatever ended the training."""

from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from cotrain.training import progress as clocks
from tests.cotrain.commands.test_train import job, place  # noqa: F401 - a fixture

SERVED = {"plain": (), "average": ("trainer.ema=0.9",)}
ENDS = {"steps": ("trainer.steps=4",), "minutes": ("trainer.minutes=0.1", "trainer.steps=1000")}


@pytest.mark.thorough
@pytest.mark.parametrize("ended", ENDS)
@pytest.mark.parametrize("served", SERVED)
def test_the_draft_is_what_the_training_left(
    served: str,
    ended: str,
    place: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = count()
    monkeypatch.setattr(clocks, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    name = f"{served} by {ended}"
    settings = (*SERVED[served], *ENDS[ended], "rollout.temperatures=[1.0]", "trainer.corpus_steps=0")
    assert job(place, name, *settings, "measure=false") == 0
    saved = torch.load(place / name / "checkpoints" / "last.ckpt", weights_only=False)
    if served == "average":
        (average,) = (state["average"] for key, state in saved["callbacks"].items() if "Averaged" in key)
    assert job(place, name, *settings) == 0
    draft = load_file(place / name / "draft" / "model.safetensors")
    trained = {key.removeprefix("draft."): value for key, value in saved["state_dict"].items()}
    names = [key for key in trained if key in draft]
    assert len(names) > 8
    wanted = dict(zip(names, average, strict=True)) if served == "average" else trained
    for key in names:
        torch.testing.assert_close(draft[key], wanted[key].to(draft[key].dtype), msg=key)
    if served == "average":
        assert any(not torch.equal(draft[key], trained[key]) for key in names)
