"""Log-probabilities of emitted tokens: those of one forward of the target over the whole text, by transformers, before
the settings and after those of `tests.reference`, whatever the draft, the rule, the batch and the ends of the rows."""

import math
from functools import cache
from typing import Any

import pytest
import torch

from inference import Engine, Sampling
from inference.models.replay import Recorded
from inference.output import TokenLogprob
from inference.policy import Fixed
from inference.proposers import Independent
from inference.verify.rules import RULES
from tests import standin
from tests.encoder_decoders import own_logits, sources, t5
from tests.inference.test_mixed_settings import ENDS, IDS, LIMITS, MIXED, PROMPTS, SHAPES, Letters
from tests.kinds import KINDS, SHAPED
from tests.often import EACH_WAY, often
from tests.reference import reference
from tests.tiny import near, tiny

TOPS = [(None, 0, 3, 32)[i // 2 % 4] for i in range(len(MIXED))]
SHAPE = SHAPES["static"]
ALL = slice(None)


@cache
def target() -> Any:
    model = tiny(seed=2)
    model.generation_config.eos_token_id = ENDS
    return model


def decoded(
    proposer: Any, rule: str, tops: list[int | None] = TOPS, model: Any = None, rows: slice = ALL, **settings: Any
) -> Any:
    tokenizer: Any = Letters()
    engine = Engine(model or target(), proposer, verify=rule, policy=Fixed(3), rows=4, tokenizer=tokenizer, **settings)
    limits, sampling, ids, tops = LIMITS[rows], MIXED[rows], IDS[rows], tops[rows]
    return engine.generate(PROMPTS[rows], max_new_tokens=limits, sampling=sampling, ids=ids, seed=4, logprobs=tops)


def require(given: list[TokenLogprob], tokens: list[int], wanted: torch.Tensor, top: int) -> None:
    """The entries are those of log-probabilities wanted (T, V)."""
    assert [one.token for one in given] == tokens
    for one, scores in zip(given, wanted, strict=True):
        assert one.logprob == pytest.approx(float(scores[one.token]), abs=1e-9)
        best = scores.sort(descending=True, stable=True)
        there = [(int(id), float(score)) for score, id in zip(*best, strict=True) if score > -torch.inf][:top]
        assert [id for id, _ in one.top_logprobs] == [id for id, _ in there]
        assert [score for _, score in one.top_logprobs] == pytest.approx([score for _, score in there], abs=1e-9)


def require_targets(
    out: Any, tops: list[int | None] = TOPS, logits_of: Any = None, vocabulary: int = 32, rows: slice = ALL
) -> None:
    """All rows have the log-probabilities of the target's own logits, and rows that asked for none have none."""
    assert out.errors == [None] * len(out.tokens)
    asked = zip(PROMPTS[rows], out.tokens, MIXED[rows], tops[rows], out.logprobs, strict=True)
    for prompt, new, one, top, given in asked:
        if top is None:
            assert given is None
            continue
        text, first = [*prompt, *new], len(prompt)
        logits = (logits_of or own)(tuple(text))[first - 1 : -1, :vocabulary]  # (T, V)
        require(given.raw, new, logits.log_softmax(-1), top)
        probs = [reference(part, text[: first + i], first, one, ENDS) for i, part in enumerate(logits)]
        require(given.processed, new, torch.stack(probs).log(), top)


@cache
@torch.no_grad()
def own(text: tuple[int, ...]) -> torch.Tensor:
    """Logits (T, V)."""
    return target()(torch.tensor([text])).logits[0]


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (None, None),
        *often([(kind, None) for kind in KINDS], lambda case: case[0] in {*EACH_WAY, "ngram", "two_levels", "hybrid"}),
        *often([(kind, SHAPE) for kind in SHAPED], lambda case: case[0] in {"eagle", "independent"}),
    ],
    ids=lambda part: {SHAPE: "tree", None: "plain"}.get(part, part),
)
def test_they_are_those_of_the_targets_own_forward(kind: str | None, shape: Any) -> None:
    """With temperature 0, penalties, bans, processors, cuts, stop strings and ends in the middle of a round, rows that
    wait, and rows that ask for none, for the emitted token alone, for three and for all."""
    proposer = KINDS[kind].proposer(target(), **({"shape": shape} if shape else {})) if kind else None
    out = decoded(proposer, "coupled")
    require_targets(out)
    assert kind is None or sum(out.stats.accepted) > 0 or "pruned" in kind


@pytest.mark.parametrize(
    ("rule", "shape"),
    [*((rule, None) for rule in RULES), *((rule, SHAPE) for rule in RULES if RULES[rule].trees)],
    ids=lambda part: {SHAPE: "tree", None: "chain"}.get(part, part),
)
def test_no_rule_changes_them(rule: str, shape: Any) -> None:
    out = decoded(Independent(near(target(), 0.15), shape=shape), rule)
    require_targets(out)
    assert sum(out.stats.accepted) > 0


def test_a_padded_vocabulary_has_no_mass_past_its_tokens() -> None:
    model = tiny(vocab=40, seed=2)
    model.generation_config.eos_token_id = ENDS

    @torch.no_grad()
    def logits_of(text: tuple[int, ...]) -> torch.Tensor:
        return model(torch.tensor([text])).logits[0]

    out = decoded(Independent(near(model, 0.15)), "token", [32] * len(MIXED), model)
    require_targets(out, [32] * len(MIXED), logits_of)


@pytest.mark.parametrize("shape", [None, SHAPE], ids=["chain", "tree"])
def test_of_recorded_rounds_on_a_device(shape: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their results are overwritten by the next pass. No row has processors, since such rounds are not recorded; the
    first four ask for nothing, so that rounds without log-probabilities are recorded too."""
    monkeypatch.setattr("inference.models.replay.WARMUP", 1)
    rows, recorded = slice(1, 15, 2), []  # all with `PLAIN`
    tops = [(0, 3, 32)[i % 3] if i > 8 else None for i in range(len(MIXED))]
    record = Recorded._record

    def noted(self: Recorded, key: Any, *rest: Any) -> None:
        recorded.append(key[0])
        record(self, key, *rest)

    monkeypatch.setattr(Recorded, "_record", noted)
    with standin.device():
        model = tiny(seed=2).to("cuda")
        model.generation_config.eos_token_id = ENDS
        proposer = Independent(near(model, 0.15), shape=shape)
        out = decoded(proposer, "tree", tops, model, rows)
    require_targets(out, tops, rows=rows)
    assert {name[2] for name in recorded if name[0] == "verify"} >= {None, 32}


def test_of_a_stream_they_come_with_its_events() -> None:
    def engine() -> Engine:
        return Engine(target(), Independent(near(target(), 0.15), shape=SHAPE), verify="tree", policy=Fixed(3))

    settings: dict[str, Any] = {
        "max_new_tokens": 17,
        "sampling": Sampling(0.9, top_k=9),
        "ids": [3],
        "ignore_eos": True,
    }
    (whole,) = engine().generate([[1, 2]], logprobs=2, **settings).logprobs
    events = list(engine().stream([1, 2], logprobs=2, **settings))
    assert len(events) < 17 and all([one.token for one in event.logprobs.raw] == event.ids for event in events)  # type: ignore[union-attr]
    assert [one for event in events for one in event.logprobs.raw] == whole.raw  # type: ignore[union-attr]
    assert [one for event in events for one in event.logprobs.processed] == whole.processed  # type: ignore[union-attr]
    assert all(len(one.top_logprobs) == 2 for one in [*whole.raw, *whole.processed])  # type: ignore[union-attr]
    assert {event.logprobs for event in engine().stream([1, 2], **settings)} == {None}


def test_a_row_that_ends_in_an_error_has_those_of_its_tokens() -> None:
    def bad(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return logits if ids.shape[1] < 8 else logits - torch.inf

    out = Engine(target(), Independent(near(target(), 0.15))).generate(
        [[1, 2]], sampling=Sampling(0.9, processors=(bad,)), logprobs=1, ignore_eos=True
    )
    (given,) = out.logprobs
    assert out.finish == ["error"] and given
    assert [one.token for one in given.raw] == [one.token for one in given.processed] == out.tokens[0]
    assert len(out.tokens[0]) == 6


def test_an_encoder_decoder_has_them_too() -> None:
    model = t5()
    engine = Engine(model, Independent(near(model), shape=SHAPE), verify="tree", policy=Fixed(3), rows=2)
    prompts = sources(model, 3)
    out = engine.generate(prompts, max_new_tokens=9, sampling=Sampling(0.8, top_k=5), ignore_eos=True, logprobs=4)
    for start, new, given in zip(engine.starts(prompts), out.tokens, out.logprobs, strict=True):
        logits = own_logits(model, [*start, *new], start.source)[len(start) - 1 : -1]  # type: ignore[attr-defined]
        assert given
        require(given.raw, new, logits.log_softmax(-1), 4)
        least = logits.topk(5).values[:, -1:]
        require(given.processed, new, (logits / 0.8).masked_fill(logits < least, -torch.inf).log_softmax(-1), 4)


def test_they_cost_no_pass_and_nothing_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def passes(top: int | None) -> int:
        engine, count = Engine(target(), Independent(near(target(), 0.15))), 0
        forward = engine.target.forward

        def counted(*args: Any, **settings: Any) -> Any:
            nonlocal count
            count += 1
            return forward(*args, **settings)

        monkeypatch.setattr(engine.target, "forward", counted)
        assert (engine.generate([[1, 2]], max_new_tokens=9, logprobs=top).logprobs[0] is None) == (top is None)
        return count

    assert passes(3) == passes(None) > 0
    monkeypatch.setattr("inference.verification.logprobs", None)
    passes(None)


@pytest.mark.parametrize("top", [-1, True, 2.0, 33, "3", [1], [None, -1]])
def test_wrong_numbers_are_rejected(top: Any) -> None:
    with pytest.raises(
        ValueError, match=r"prompt \d: logprobs must be None, or a number .* from 0 to 32, not|one value"
    ):
        Engine(target()).generate([[1], [2]], logprobs=top)


def test_those_of_a_target_in_bfloat16_are_of_a_distribution() -> None:
    """Computed from its logits in more digits than these have."""
    engine = Engine(tiny(seed=2, dtype=torch.bfloat16), rows=1)
    out = engine.generate([[1, 2, 3]], max_new_tokens=6, seed=1, logprobs=32, ignore_eos=True)
    for one in out.logprobs[0].raw:
        assert sum(math.exp(score) for _, score in one.top_logprobs) == pytest.approx(1, abs=1e-5)
