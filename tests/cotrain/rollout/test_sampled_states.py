"""States that are kept from the passes that sample texts are those of a later pass over the texts."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cotrain.rollout.sampled_states import SampledStates
from cotrain.students.base import LAST
from cotrain.teacher.states_cache import MemoryCache
from cotrain.teacher.target_model import served
from inference import Engine, Sampling
from inference.policy import Fixed
from tests.cotrain.commands.test_train import job, place  # noqa: F401 - a fixture
from tests.tiny import tiny

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [1, 2, 3, 9], [2], [3, 3]]
ASKED: dict[str, Any] = {"max_new_tokens": [3, 8, 1, 5, 2, 8], "sampling": Sampling(1.0), "seed": 1}


@pytest.mark.parametrize(("rows", "dtype"), [*((n, torch.float64) for n in (1, 2, 6)), (2, torch.bfloat16)])
def test_kept_states_are_those_of_a_later_pass(rows: int, dtype: torch.dtype) -> None:
    """Of texts that wait, move to other slots and end at different lengths; in the target's dtype, whatever an engine
    computes in."""
    target, layers = tiny(layers=3, dtype=dtype), (LAST, 0, 2)
    away = {} if dtype == torch.float64 else {"rtol": 0.1, "atol": 1.0}
    engine = Engine(target, kept := SampledStates(layers, 2**20), policy=Fixed(0), rows=rows)
    out = engine.generate(PROMPTS, **ASKED)
    assert out.tokens == Engine(target, rows=rows).generate(PROMPTS, **ASKED).tokens
    texts = [prompt + new for prompt, new in zip(PROMPTS, out.tokens, strict=True)]
    assert {*map(tuple, texts)} == {*kept.records}
    for text in texts:
        states, record = served(target, layers=layers[1:])[0](torch.tensor([text])), kept.records[*text,]
        assert record.keys() == states.keys()
        for layer, part in record.items():
            assert part.shape == states[layer][0].shape and not part[-1].any()
            torch.testing.assert_close(part[:-1], states[layer][0, :-1], **away)  # which compares dtypes, too
    few = SampledStates(layers, 2 * 9 * 3 * 16 * dtype.itemsize)  # bytes of 18 tokens
    Engine(target, few, policy=Fixed(0), rows=rows).generate(PROMPTS, **ASKED)
    assert 0 < sum(map(len, few.records)) <= 18 < sum(map(len, texts))


@pytest.mark.parametrize("setting", ["minutes=0.5", "trainer.minutes=0.5"])
def test_a_run_with_minutes_reads_no_text_again(setting: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    stored, fill = [], MemoryCache.fill

    def counted(self: MemoryCache, ids: torch.Tensor, *rest: Any, **others: Any) -> None:
        stored.append((len(self.records), len(ids)))
        fill(self, ids, *rest, **others)

    monkeypatch.setattr(MemoryCache, "fill", counted)
    settings = "measure=false trainer.corpus_steps=0 rollout.temperatures=[1.0] trainer.steps=40".split()
    assert job(place, f"kept {setting}", setting, *settings) == 0
    ((count, texts),) = stored
    assert count == texts * setting.startswith("minutes") and texts
