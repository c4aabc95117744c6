"""Arms of a timing on tiny models."""

import copy
from types import SimpleNamespace

import pytest
import torch

from inference import Engine, Sampling
from inference.measure.arms import engine_arm, seeded, transformers_arm
from inference.measure.timing import interleave
from inference.policy import Fixed
from inference.proposers import Independent
from studies.assisted import assisted_arm

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]


def test_engine_arm_ignores_end_tokens_and_counts(pair):
    target, draft = pair
    engine = Engine(target, Independent(draft), policy=Fixed(2), rows=2)
    timed = interleave([engine_arm("a", engine, Sampling(), 6)], PROMPTS, rows=2, warmup=0, repeats=2)
    texts, stats = timed.texts("a"), timed.stats("a")
    assert [len(text) for text in texts.tokens] == [6] * 6
    assert texts.prompts == PROMPTS[:2] * 2 + PROMPTS[2:] * 2
    assert [row.tokens for row in texts.counts] == [6] * 6
    expected = engine.generate([texts.prompts[2]], max_new_tokens=6, seed=1, ids=[texts.ids[2]], ignore_eos=True)
    assert texts.tokens[2] == expected.tokens[0]  # the repeat had the next seed
    assert stats.tokens == 36 and stats.target_calls == sum(row.target_calls for row in texts.counts)
    assert 0 < sum(r.decode_seconds for r in timed.results("a")) < sum(r.seconds for r in timed.results("a"))


def test_transformers_arms_decode_under_the_same_distribution(pair):
    target, draft = pair
    own, greedy = target.generation_config, Sampling(temperature=0)
    arms = [
        engine_arm("engine", Engine(target, rows=3), greedy, 8),
        transformers_arm("plain", target, greedy, 8),
        assisted_arm("assisted", target, greedy, 8, assistant=draft, k=3),
        assisted_arm("perfect", target, greedy, 8, assistant=copy.deepcopy(target), k=3),
    ]
    timed = interleave(arms, PROMPTS, rows=3, warmup=0)
    for arm in ("plain", "assisted", "perfect"):
        assert timed.texts(arm).tokens == timed.texts("engine").tokens
    assert timed.stats("plain").tau == 1
    assert timed.stats("perfect").tau == 4  # all three drafts, and one more
    assert timed.results("plain")[0].decode_tokens == 3 * 7
    assert timed.results("perfect")[0].decode_tokens == 3 * 4
    assert target.generation_config is own


def test_transformers_arm_samples_from_the_given_regime(pair):
    arm = transformers_arm("plain", pair[0], Sampling(), 12)
    before = torch.random.get_rng_state()
    texts = [arm.run([PROMPTS[0]], [0], seed).tokens for seed in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]  # top_k = 1 of the model's own settings would make all equal
    assert torch.equal(before, torch.random.get_rng_state())


def test_settings_that_an_arm_cannot_express_are_errors(pair):
    with pytest.raises(ValueError, match="presence_penalty"):
        transformers_arm("a", pair[0], Sampling(presence_penalty=1), 4)
    with pytest.raises(ValueError, match="stop_ids"):
        engine_arm("a", Engine(pair[0]), Sampling(stop_ids=(3,)), 4)


def test_the_generators_of_cpu_and_gpu_go_on_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {"cuda": torch.arange(3)}
    # Another accelerator of the machine, or a stand-in that ran before in this process, is not asked.
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("xpu"))
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: numbers[torch.device(device).type])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: numbers.update(cuda=state))
    before = torch.get_rng_state()
    with seeded(SimpleNamespace(device=torch.device("cuda", 0)), 5):  # type: ignore[arg-type]
        numbers["cuda"] = torch.ones(3)
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before) and torch.equal(numbers["cuda"], torch.arange(3))
