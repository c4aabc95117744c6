"""A row without a distribution ends alone, with its message; drafting does not change which rows do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from inference import Engine, Sampling
from inference.proposers import Independent, NGram
from tests import standin
from tests.often import often
from tests.tiny import near, tiny

PROMPTS = [[3, 5, 7, 3, 5], [9, 2], [4] * 12, [6, 31, 6, 31], [12, 1]]
RUN: dict[str, Any] = {"max_new_tokens": 16, "seed": 3, "ignore_eos": True}
KINDS: dict[str, Callable[[], Any]] = {
    "plain": lambda: None,
    "draft": lambda: Independent(near(tiny())),
    "ngram": NGram,
}


def drafted(kind: str, target: Any = None, **settings: Any) -> Engine:
    return Engine(target or tiny(), KINDS[kind](), rows=3, **settings)


def no_logits(model: Any, id: int) -> Any:
    """A model without logits after this id."""
    with torch.no_grad():
        model.get_input_embeddings().weight[id] = torch.nan
    return model


def only(*ids: int) -> Sampling:
    return Sampling(0.9, banned=tuple((id,) for id in range(32) if id not in ids))


@pytest.mark.parametrize("rule", ["token", "coupled"])
def test_ids_that_the_draft_lacks_are_decoded_all_the_same(rule: str) -> None:
    """Pitfall 40: bans leave only ids that the draft does not have."""
    draft = Independent(tiny(vocab=20, seed=3))
    sampling = [only(25, 26, 27), Sampling(0.9), only(3, 30)]
    out = Engine(tiny(), draft, verify=rule).generate(PROMPTS[:3], sampling=sampling, **RUN)
    assert out.finish == ["length"] * 3 and out.errors == [None] * 3
    assert set(out.tokens[0]) <= {25, 26, 27} and set(out.tokens[2]) <= {3, 30}
    assert out.stats.rows[0].drafted == [] and out.stats.rows[1].drafted
    plain = Engine(tiny(), verify="coupled").generate(PROMPTS[:3], sampling=sampling, **RUN)
    assert rule != "coupled" or out.tokens == plain.tokens


class Asked:
    """A processor that records the longest text of its calls, and raises from some length on."""

    def __init__(self, end: int = 1000) -> None:
        self.end, self.longest = end, 0

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        self.longest = max(self.longest, ids.shape[1])
        if ids.shape[1] >= self.end:
            raise KeyError("no such state")
        return logits


@pytest.mark.parametrize("kind", KINDS)
def test_processors_are_not_called_past_a_rows_own_drafts(kind: str) -> None:
    asked = Asked()
    sampling = [Sampling(0.9, processors=(asked,)), Sampling(0.9), Sampling(0.9)]
    out = drafted(kind).generate(PROMPTS[:3], sampling=sampling, **RUN | {"max_new_tokens": [6, 16, 16]})
    assert out.finish[0] == "length" and asked.longest == len(PROMPTS[0]) + 5


BAD: dict[str, Callable[[], Sampling]] = {
    "banned": lambda: only(),
    "raises": lambda: Sampling(0.9, processors=(Asked(len(PROMPTS[1]) + 7),)),
    "dead end": lambda: Sampling(0.9, processors=(lambda ids, x: x if ids.shape[1] < 9 else x - torch.inf,)),
    "NaN": lambda: Sampling(0.9, processors=(lambda ids, x: x * (torch.nan if ids.shape[1] > 8 else 1.0),)),
}


@pytest.mark.parametrize(
    "kind, rule, bad",
    [("plain", "token", "raises"), *(("draft", "block", bad) for bad in BAD), ("ngram", "token", "NaN")],
)
def test_a_row_that_cannot_go_on_ends_alone(kind: str, rule: str, bad: str) -> None:
    """Pitfall 42: other rows are bit for bit as without it; its text so far stays."""
    sampling = [Sampling(0.9), BAD[bad](), *[Sampling(0.9)] * 3]
    out = drafted(kind, verify=rule).generate(PROMPTS, sampling=sampling, ids=range(5), **RUN)
    rest = [0, 2, 3, 4]
    alone = drafted(kind, verify=rule).generate([PROMPTS[i] for i in rest], sampling=Sampling(0.9), ids=rest, **RUN)
    assert [out.tokens[i] for i in rest] == alone.tokens and [out.finish[i] for i in rest] == alone.finish
    assert out.finish[1] == "error" and [m is None for m in out.errors] == [True, False, True, True, True]
    assert len(out.tokens[1]) == (0 if bad == "banned" else 7)
    assert ("KeyError: 'no such state'" if bad == "raises" else "no token is left") in str(out.errors[1])
    with pytest.raises(RuntimeError, match="prompt 1: "):
        out.whole()


@pytest.mark.parametrize(
    "kind, rule, sampling",
    often(
        [
            ("plain", "token", Sampling(0.0)),
            ("draft", "block", Sampling(0.9, top_k=9, top_p=0.9)),
            ("draft", "match", Sampling(0.0)),
            ("ngram", "token", Sampling(0.9, top_k=9, top_p=0.9)),
        ],
        lambda case: case[1] == "block",
    ),
)
def test_nan_in_a_prompt_ends_its_row_and_leaves_no_trace(kind: str, rule: str, sampling: Sampling) -> None:
    """Pitfall 41: other rows, and the next rows of its slot, are as with an intact model."""
    prompts = [[3, 5, 7], [9, 30, 2] * 8, [4] * 12, [6, 1], [12, 1], [8], [2, 2]]
    bad = no_logits(tiny(), 30)
    sampling = Sampling(sampling.temperature, sampling.top_k, sampling.top_p, logit_bias={30: -1e9})
    out = drafted(kind, bad, verify=rule).generate(prompts, sampling=sampling, **RUN)
    good = drafted(kind, verify=rule).generate(prompts, sampling=sampling, **RUN)
    assert out.finish == ["length", "error", *["length"] * 5] and out.tokens[1] == []
    assert "logits are NaN" in str(out.errors[1])
    rest = [0, *range(2, 7)]
    assert [out.tokens[i] for i in rest] == [good.tokens[i] for i in rest]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_become_no_tokens(value: float) -> None:
    model = tiny()
    with torch.no_grad():
        model.lm_head.weight[7] = value
    for kind, temperature in zip(KINDS, (0.0, 1.0, 0.0), strict=True):
        out = drafted(kind, model).generate(PROMPTS, sampling=Sampling(temperature), **RUN)
        assert out.finish.count("error") >= 2 and all(error is None or "logits" in error for error in out.errors)


def test_a_draft_with_nan_is_only_rejected() -> None:
    """A draft with NaN is decoded by the target; a round has a distribution wherever plain decoding has."""
    model, prompts = tiny(), [[3, 5, 7], [9, 2], [4] * 12]
    for target, draft in ((model, no_logits(near(model), 11)), (no_logits(tiny(), 30), near(model))):
        sampling = Sampling(0.9, logit_bias={30: -1e9} if target is not model else None)
        wanted = Engine(target, verify="coupled").generate(prompts, sampling=sampling, **RUN)
        out = Engine(target, Independent(draft), verify="coupled").generate(prompts, sampling=sampling, **RUN)
        assert out.tokens == wanted.tokens and out.errors == [None] * 3
        # certain drafts of that id are rejected, whatever is stored in the slot
        out = Engine(target, Always(30), verify="coupled").generate(prompts, sampling=sampling, **RUN)
        assert out.tokens == wanted.tokens and out.errors == [None] * 3


class Sometimes:
    """Drafts in some rounds alone, so that later rounds read, masked, what a draft left in the slot."""

    def lengths(self, texts: Any) -> list[int]:
        return [(0, 4, 0, 2, 0)[len(text) % 5] for text in texts]


@pytest.mark.parametrize("rows", [2, 3])
def test_nan_of_rejected_drafts_does_not_change_a_text(rows: int) -> None:
    """Nor a later text of that slot: a draft that leaves NaN may be followed by rounds without drafts."""
    prompts = [[3, 5, 7], [9, 2] * 9, [4] * 12, [6], [12, 1], [8] * 5, [2, 2] * 14, [1], [5], [7, 8, 9]]
    run = RUN | {"max_new_tokens": [16, 25, 7, 16, 12, 9, 16, 22, 16, 5]}
    sampling = Sampling(0.9, logit_bias={30: -1e9})
    wanted = Engine(no_logits(tiny(), 30), verify="coupled").generate(prompts, sampling=sampling, **run)
    for proposer in (Always(30), Always(11)):
        engine = Engine(no_logits(tiny(), 30), proposer, verify="coupled", policy=Sometimes(), rows=rows)
        for _ in range(2):
            out = engine.generate(prompts, sampling=sampling, **run)
            assert out.tokens == wanted.tokens and out.errors == [None] * 10


def test_no_slot_keeps_nan() -> None:
    """After a row that ended because of it: a shorter next text does not overwrite the whole slot."""
    prompts, run = [[4, 4], [5] * 6 + [30] + [5] * 5, [9]], RUN | {"max_new_tokens": [20, 20, 2]}
    engine = Engine(no_logits(tiny(), 30), verify="coupled", rows=2)
    out = engine.generate(prompts, sampling=Sampling(0.9, logit_bias={30: -1e9}), **run)
    assert out.finish == ["length", "error", "length"]
    stored = [part for store in engine.target.cache.stores for part in (store.keys, store.values)]
    assert all(bool(part.isfinite().all()) for part in stored)


class Always(NGram):
    """Drafts one id, whatever the text."""

    def __init__(self, id: int) -> None:
        super().__init__()
        self.id = id

    def propose(self, round: Any) -> Any:
        proposal = super().propose(round)
        x = torch.full((len(round.k), max(round.k)), self.id)
        return proposal._replace(x=x, k=list(round.k))


def test_a_stream_raises_with_the_message_of_its_row() -> None:
    engine, ids = drafted("draft"), []
    with pytest.raises(RuntimeError, match="no such state"):
        for event in engine.stream(PROMPTS[1], sampling=BAD["raises"](), seed=3):
            ids += event.ids
    assert len(ids) == 7
    assert len(engine.generate([PROMPTS[0]], **RUN).tokens[0]) == 16


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(logit_bias={32: 1.0}),
        Sampling(banned=((3, 40),)),
        Sampling(stop_ids=(99,)),
        Sampling(banned_first=(32,)),
    ],
)
def test_settings_with_foreign_ids_are_rejected_before_anything_runs(sampling: Sampling) -> None:
    with pytest.raises(ValueError, match=r"prompt 1: Sampling.logit_bias, banned, .* or stop_ids .* go from 0 to 31"):
        drafted("draft").generate([[1], [2]], sampling=[Sampling(), sampling])


@pytest.mark.thorough
@pytest.mark.parametrize("sampling", [Sampling(0.8), Sampling(0.8, repetition_penalty=1.2, banned=((1,), (2, 3)))])
def test_a_draft_on_another_device_than_the_target(sampling: Sampling) -> None:
    run = {"prompts": PROMPTS[:2], "sampling": sampling, "max_new_tokens": 6, "ignore_eos": True}
    wanted = Engine(tiny(), Independent(near(tiny()))).generate(**run)
    with standin.device():
        for draft in ("cuda:1", "cpu"):
            engine = Engine(tiny().to("cuda:0"), Independent(near(tiny()).to(draft)))
            assert engine.generate(**run).tokens == wanted.tokens
