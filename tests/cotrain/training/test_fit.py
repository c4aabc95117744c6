"""Which texts a step of a run learns from, on which process, and what is read ahead and judged between validations."""

from dataclasses import replace
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cotrain.data.texts import Curriculum, Texts
from cotrain.training import fit
from cotrain.training.progress import Clock, Progress
from tests.cotrain.config.test_settings_reach import job_of


def texts(count: int, begin: int) -> Texts:
    """Each of one repeated id."""
    ids = torch.arange(begin, begin + count).unsqueeze(1).expand(count, 5)
    return Texts(ids, torch.full((count,), 2), torch.full((count,), 5), ["a"] * count)


@pytest.mark.parametrize(("world", "accumulate"), [(1, 1), (2, 3)])
def test_a_training_resumes_at_its_step_on_every_process(world: int, accumulate: int) -> None:
    """Step 15 is next; corpus texts come up to step 20."""
    job = job_of(f"trainer.accumulate={accumulate}")
    corpus, sampled, a_step = texts(7, 100), texts(9, 200), 6 * accumulate
    order = list(islice(Curriculum((7, 9), 20 * a_step, 11), 15 * a_step, 22 * a_step))
    for rank in range(world):
        strategy = SimpleNamespace(root_device=torch.device("cpu"))
        trainer: Any = SimpleNamespace(world_size=world, global_rank=rank, strategy=strategy)
        loader = fit._loader(job.cfg.trainer, 15, corpus, sampled, trainer)
        mine, size = order[rank::world], 6 // world
        for number, batch in enumerate(islice(loader, 7 * accumulate)):
            keys = mine[number * size : (number + 1) * size]
            assert batch["key"].tolist() == keys
            assert batch["ids"][:, 0].tolist() == [100 + key if key < 7 else 200 + key - 7 for key in keys]
            if accumulate > 1:
                assert batch["group"] == (number % accumulate, accumulate)
                assert batch["counts"].tolist() == [accumulate * size * 3] * 2
    assert any(key < 7 for key in order) and any(key >= 7 for key in order)


def test_texts_are_read_before_training_under_the_keys_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where training sees all of them, and no sooner."""
    job, met = job_of("trainer.steps=2", "trainer.accumulate=1"), list[Any]()
    fill = lambda ids, keys, progress, source, length: met.append((ids, keys))  # noqa: E731
    module: Any = SimpleNamespace(teacher=SimpleNamespace(read=None, fill=fill))
    corpus, sampled = texts(4, 100), texts(8, 200)
    sampled = replace(sampled, length=torch.tensor([2, 3, 4, 4, 3, 2, 2, 4]))
    fit._remember(job, module, corpus, sampled)
    ((ids, keys),) = met
    order = [2, 3, 7, 1, 4, 0, 5, 6]  # texts of like length are read together
    assert torch.equal(ids, sampled.ids[order]) and keys.tolist() == [4 + row for row in order]
    fit._remember(job, module, texts(5, 100), sampled)
    assert len(met) == 1


def test_points_are_of_the_regime_and_of_what_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    job, met = job_of("rollout.new_tokens=40"), list[Any]()
    monkeypatch.setattr(fit, "part_of", lambda held, tokens: met.append(tokens) or held)
    module: Any = SimpleNamespace(held_out={0.0: "cold", 0.8: "own"}, temperature=0.8)
    clock, rounded = Clock(Progress(160), 5), list[Any]()
    points = fit._points(job, module, clock, rounded)
    assert met == [160 * 3 * 6 * 40] and points.part == "own" and points.clock is clock and points.rounded is rounded
    assert points.served == (3, "greedy", "block")
