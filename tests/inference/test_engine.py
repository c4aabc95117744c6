"""The batched engine: its texts are those of each row alone, and of plain decoding."""

import inspect
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from inference import Engine, Sampling
from inference.models.lm import LM, WORTH, store_prompts
from inference.policy import Fixed
from inference.proposers import Independent, NGram
from inference.proposers.base import States
from tests.often import often
from tests.tiny import continued, near, tiny

END = 31
# mixed lengths, ids 0 (pad) and END inside, more prompts than rows
PROMPTS = [[3, 5, 7, 3, 5], [END], [0, 0, 9, 4, 4, 0, END, 8, 2, 9, 9, 0], [0], [6, END, 6, END, 6], [1, 2], [12] * 9]
LIMITS = [24, 9, 17, 30, 1, 12, 2]
RULES = ["token", "coupled"]


class Uneven:
    """Draft lengths that differ between rows and rounds, 0 among them; a function of each row's own text."""

    def lengths(self, texts):
        return [(4, 0, 2, 0)[(len(text) + text[-1]) % 4] for text in texts]


@pytest.fixture(scope="module")
def target():
    return tiny(eos=END)


@pytest.fixture(scope="module")
def draft(target):
    return near(target)


@pytest.fixture
def proposer(request, draft):
    return {
        "independent": lambda: Independent(draft),
        "ngram": lambda: NGram(),
        "plain": lambda: None,
    }[request.param]()


@pytest.mark.parametrize(
    ("proposer", "policy"),
    often(
        [("plain", Fixed(3)), ("independent", Fixed(3)), ("independent", Uneven()), ("ngram", Uneven())],
        lambda case: case != ("independent", Fixed(3)),
    ),
    ids=["fixed-plain", "fixed-independent", "uneven-independent", "uneven-ngram"],
    indirect=["proposer"],
)
def test_greedy_text_is_that_of_transformers(target, proposer, policy):
    engine = Engine(target, proposer, rows=3, policy=policy)
    out = engine.generate(PROMPTS, max_new_tokens=LIMITS, sampling=Sampling(0))
    assert out.tokens == [continued(target, text, n) for text, n in zip(PROMPTS, LIMITS, strict=True)]
    assert out.finish == ["stop" if tokens[-1] == END else "length" for tokens in out.tokens]
    assert out.stats.tokens == sum(map(len, out.tokens))


@pytest.mark.parametrize("rule", RULES)
def test_permuting_the_batch_permutes_the_output(target, draft, rule):
    engine = Engine(target, Independent(draft), verify=rule, rows=4)
    out, order = engine.generate(PROMPTS, max_new_tokens=12), [5, 2, 0, 6, 1, 4, 3]
    again = engine.generate([PROMPTS[i] for i in order], max_new_tokens=12)
    assert again.tokens == [out.tokens[i] for i in order]


@pytest.mark.parametrize("rule", RULES)
def test_equal_prompts_get_different_texts_and_the_seed_decides(target, draft, rule):
    engine = Engine(target, Independent(draft), verify=rule)
    run = lambda seed: engine.generate([[3, 5]] * 8, max_new_tokens=8, seed=seed, ignore_eos=True).tokens  # noqa: E731
    first = run(0)
    assert len(set(map(tuple, first))) == 8
    assert run(0) == first
    assert all(ours != theirs for ours, theirs in zip(run(1), first, strict=True))


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_draft_equal_to_the_target_gives_k_plus_1_tokens_every_round(rule):
    """Rows of different lengths (rows 16, 17, 20)."""
    model = tiny()
    engine = Engine(model, Independent(model), verify=rule, rows=8)
    prompts = [list(range(1, n + 2)) for n in range(8)]
    out = engine.generate(prompts, max_new_tokens=100)
    for row in out.stats.rows:
        assert row.starts == list(range(0, 100, 5))
        assert row.drafted == row.accepted == [20] * 4


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(repetition_penalty=1.3)])
def test_rounds_without_drafts_leave_the_draft_in_step(sampling):
    """Lengths 0, 2 and 4 mixed in every round: a draft equal to the target is always accepted (row 18)."""
    model = tiny()
    engine = Engine(model, Independent(model), rows=4, policy=Uneven())
    stats = engine.generate(PROMPTS, max_new_tokens=40, sampling=sampling).stats
    assert stats.drafted == stats.accepted and min(stats.drafted) > 20


class Watched(Independent):
    """Records how many tokens of each text its slots lack when a round begins."""

    def propose(self, round):
        self.lacking.append([len(text) - n for text, n in zip(round.texts, self.stored, strict=True)])
        return super().propose(round)


def test_the_draft_lacks_one_token_or_two_after_full_acceptance(target, draft):
    watched = Watched(draft)
    watched.lacking = []
    out = Engine(target, watched, rows=1).generate([[3, 5, 7]], max_new_tokens=62, ignore_eos=True)
    starts = out.stats.rows[0].starts
    emitted = [after - before for before, after in zip(starts, starts[1:], strict=False)]
    assert {1, 5} <= set(emitted)
    assert [row for (row,) in watched.lacking] == [1] + [1 + (n == 5) for n in emitted][: len(watched.lacking) - 1]


def test_a_stream_is_generate_and_says_what_was_drafted(target, draft):
    engine = Engine(target, Independent(draft))
    for text in PROMPTS[:3]:
        out = engine.generate([text], max_new_tokens=20, seed=2)
        events = list(engine.stream(text, max_new_tokens=20, seed=2))
        kinds = [kind for event in events for kind in event.kinds]
        assert [token for event in events for token in event.ids] == out.tokens[0]
        assert len(events) == out.stats.target_calls
        assert kinds.count("drafted") == sum(out.stats.accepted)


@pytest.mark.parametrize("verify", often(["token", "coupled"], {"token"}.__contains__))
def test_prompts_in_spare_slots_do_not_change_texts(verify: str) -> None:
    """Rows end one by one, so prompts are stored before their turn; each text is as alone."""
    model = tiny()
    prompts = [[(7 * i + 5 * n) % 30 + 1 for i in range(n)] for n in (3, 9, 1, 6, 14, 2, 8, 5, 11, 4, 7)]
    limits, settings = [5, 21, 9, 30, 14, 7, 26, 11, 18, 3, 12], {"sampling": Sampling(0.9), "ignore_eos": True}
    staged: list[int] = []

    class Noted(Independent):
        def stage(self, low: int, prompts: Sequence[list[int]], states: States) -> None:
            if low >= 4:
                staged.append(len(prompts))
            super().stage(low, prompts, states)

    many = Engine(model, Noted(near(model)), rows=4, verify=verify)
    out = many.generate(prompts, max_new_tokens=limits, ids=range(11), **settings)
    one = Engine(model, Independent(near(model)), rows=1, verify=verify)
    for key, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        alone = one.generate([prompt], max_new_tokens=limit, ids=[key], **settings)
        assert out.tokens[key] == alone.tokens[0] and out.stats.rows[key] == alone.stats.rows[0]
    assert sum(staged) >= 4 and max(staged) == 2


def test_a_beginning_is_read_once_and_prompts_of_unlike_length_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[5] * 9 + [n] * more for n, more in ((3, 12), (1, 2), (4, 13), (2, 3))]
    engine, shapes, store = Engine(tiny(positions=64), rows=4), [], LM.store
    expected = engine.generate(prompts, max_new_tokens=3, ids=range(4)).tokens
    monkeypatch.setitem(WORTH, "cpu", 3)

    def noted(lm: LM, ids: torch.Tensor, *others: Any, **settings: Any) -> States:
        shapes.append(tuple(ids.shape))
        return store(lm, ids, *others, **settings)

    monkeypatch.setattr(LM, "store", noted)
    assert engine.generate(prompts, max_new_tokens=3, ids=range(4)).tokens == expected
    assert shapes == [(1, 9), (2, 2), (1, 9), (2, 12)]
    lms = [LM(tiny(positions=64), 2) for _ in range(2)]
    with torch.inference_mode():
        for lm, worth in zip(lms, (3, 99), strict=True):  # also in passes of four positions
            monkeypatch.setitem(WORTH, "cpu", worth)
            store_prompts(lm, 0, prompts[::2], chunk=4)
    keys = [lm.cache.stores[-1].keys[:, :, :20] for lm in lms]
    torch.testing.assert_close(*keys)
    assert shapes[4:7] == [(1, 4), (1, 4), (1, 1)]


def test_an_end_id_of_zero_ends_a_text() -> None:
    """Of the generation config; the model's own config has another, or none."""
    for other in (5, None):
        target = tiny(vocab=16, layers=1, eos=other)
        target.generation_config.eos_token_id = 0
        sampling = Sampling(0, logit_bias={0: 1e4})
        out = Engine(target).generate([[3, 1]], max_new_tokens=4, sampling=sampling)
        assert (out.tokens, out.finish) == ([[0]], ["stop"])


STREAM_ARGUMENTS: dict[str, Any] = {
    "max_new_tokens": 3,
    "sampling": Sampling(0.4, top_k=3),
    "seed": 8,
    "ids": [77],
    "ignore_eos": True,
}


def test_a_stream_passes_on_all_that_it_is_given() -> None:
    """Each argument changes the text, and to that of `generate`; but for logprobs, which `test_logprobs` asks for."""
    assert {*inspect.signature(Engine.stream).parameters} - {"self", "prompt", "logprobs"} == {*STREAM_ARGUMENTS}
    engine = Engine(tiny(eos=13), Independent(near(tiny(layers=1))), policy=Fixed(2), rows=1)

    def streamed(**settings: Any) -> list[int]:
        return [token for event in engine.stream([1, 2, 3], **settings) for token in event.ids]

    usual: dict[str, Any] = {
        "max_new_tokens": 24,
        "seed": next(
            seed for seed in range(99) if engine.generate([[1, 2, 3]], max_new_tokens=24, seed=seed).finish == ["stop"]
        ),
    }
    for name, value in STREAM_ARGUMENTS.items():
        given = usual | {name: value}
        assert streamed(**given) == engine.generate([[1, 2, 3]], **given).tokens[0] != streamed(**usual), name


def test_rows_of_one_noise_keep_their_own_settings() -> None:
    """The second text enters the slot of the first one, under the same id."""
    engine, both = Engine(tiny(), rows=1), [Sampling(0.3), Sampling(1.7, repetition_penalty=1.5)]
    together = engine.generate([[3, 5], [3, 5]], max_new_tokens=12, sampling=both, ids=[7, 7], ignore_eos=True).tokens
    alone = [
        engine.generate([[3, 5]], max_new_tokens=12, sampling=one, ids=[7], ignore_eos=True).tokens[0] for one in both
    ]
    assert together == alone and alone[0] != alone[1]
