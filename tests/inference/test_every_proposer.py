"""What every kind of proposer keeps to: the text stays the target's, whoever shares the batch; distributions are those
that were drawn from; forced rounds say what measured rounds do. A kind is named in `tests.kinds`."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from inference import Engine, Sampling
from inference.exactness.verdict import check
from inference.models.lm import WORTH
from inference.policy import Fixed
from inference.proposers import KINDS as REGISTERED
from inference.proposers import kind_of
from inference.proposers.base import Proposer
from inference.round import DecodingRound
from inference.sampling import one_hot
from tests import standin
from tests.inference.test_distribution import p_value, pair
from tests.kinds import KINDS, SHAPED, example_code
from tests.often import EACH_WAY, often
from tests.tiny import emitted, tiny

PROMPTS = [[(7 * i + 5 * n) % 30 + 1 for i in range(n)] for n in (3, 9, 1, 6, 14, 2, 8, 1, 11, 4, 7)]
LIMITS = [5, 21, 9, 30, 14, 7, 26, 11, 18, 3, 12]
MIXED = [Sampling(0.8), Sampling(0), Sampling(1.1, top_k=5), Sampling(0.9, repetition_penalty=1.2, banned=((3,),))]
SAMPLING = [MIXED[n % 4] for n in range(len(PROMPTS))]
WHOLE: dict[str, Any] = {"max_new_tokens": LIMITS, "sampling": SAMPLING, "ids": range(len(PROMPTS)), "ignore_eos": True}
SHORTER = WHOLE | {"max_new_tokens": [min(limit, 14) for limit in LIMITS]}


class Uneven:
    """Draft lengths 0, 3 and 1 side by side, by the length of the text."""

    def lengths(self, texts: Sequence[list[int]]) -> list[int]:
        return [(0, 3, 1)[len(text) % 3] for text in texts]


@pytest.fixture(params=[name for name in KINDS if KINDS[name].drawn])
def drawn_kind(request: pytest.FixtureRequest) -> Any:
    return KINDS[request.param].proposer


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Any:
    return KINDS[request.param].proposer


# certain drafts and those of two verifications too
@pytest.mark.parametrize("name", often(KINDS, {*EACH_WAY, "ngram", "two_levels"}.__contains__))
def test_the_distribution_of_the_text_is_the_targets(name: str) -> None:
    """Three tokens of several rounds, by chi-square. Under block, whose thresholds read what all drafts of a round come
    with; no proposer knows the rule, so what token makes of the same drafts `test_distribution` shows."""
    target, _ = pair()
    assert p_value(target, KINDS[name].proposer(target), "block", samples=4000) > 1e-4


@pytest.mark.parametrize("name", often(KINDS, {*EACH_WAY, "hybrid", "two_levels"}.__contains__))
@pytest.mark.parametrize("same", [0, 4])
def test_rows_are_as_if_alone(name: str, same: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows enter, wait in spare slots, leave and move; settings and draft lengths are mixed; prompts of one token: each
    row's text and counts are those of a call of its own. same: with how many ids all prompts begin, which are then read
    once, and prompts of other lengths in passes of their own."""
    monkeypatch.setitem(WORTH, "cpu", 3 if same else 32)
    kind, target, prompts = KINDS[name].proposer, tiny(positions=64), [[9, 8, 7, 6][:same] + one for one in PROMPTS]
    many = Engine(target, kind(target), rows=4, policy=Uneven())
    many.generate(prompts[::-1], max_new_tokens=4, seed=7)  # an earlier call leaves nothing behind
    limits = SHORTER["max_new_tokens"]
    out = many.generate(prompts, **SHORTER)
    one = Engine(target, kind(target), rows=1, policy=Uneven())
    for n, prompt in enumerate(prompts):
        alone = one.generate([prompt], max_new_tokens=limits[n], sampling=SAMPLING[n], ids=[n], ignore_eos=True)
        assert (out.tokens[n], out.stats.rows[n]) == (alone.tokens[0], alone.stats.rows[0]), n
    assert sum(out.stats.drafted) > 20


TO_THE_END = WHOLE | {"max_new_tokens": 18}


@pytest.fixture(scope="module")
def plain() -> Any:
    """Plain decoding with shared noise, up to the end of the context."""
    return Engine(tiny(positions=18), verify="coupled", rows=3).generate(PROMPTS, **TO_THE_END)


def test_coupled_text_is_plain_text(kind: Any, plain: Any) -> None:
    """Up to the end of the context, with rows that come and go."""
    target = tiny(positions=18)
    out = Engine(target, kind(target), verify="coupled", rows=3, policy=Uneven()).generate(PROMPTS, **TO_THE_END)
    assert out.tokens == plain.tokens and out.finish == plain.finish
    assert [len(prompt) + len(text) for prompt, text in zip(PROMPTS, plain.tokens, strict=True)] == [18] * len(PROMPTS)


# that of independent drafts is in `test_round_graphs`
@pytest.mark.parametrize("name", often(KINDS, {"eagle", "medusa", "early_exit"}.__contains__))
def test_text_on_a_device_is_that_of_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With passes and verdicts recorded there, and slots that grow under them."""
    kind = KINDS[name].proposer
    monkeypatch.setattr("inference.proposers.eagle.FIRST_SLOTS", 8)
    monkeypatch.setattr("inference.models.replay.WARMUP", 1)
    host, whole = tiny(), {"max_new_tokens": [3, 5, 4], "sampling": SAMPLING[:3], "ids": range(3)}
    wanted = Engine(host, kind(host), rows=2, policy=Fixed(2)).generate(PROMPTS[:3], **whole)
    with standin.device():
        target = tiny().to("cuda")
        out = Engine(target, kind(target), rows=2, policy=Fixed(2)).generate(PROMPTS[:3], **whole)
    assert out.tokens == wanted.tokens and out.stats.accepted == wanted.stats.accepted


ONE_OF_EACH = ("independent", "ngram", "hybrid", "two_levels")  # drafts that are draws, certain, either; of a round


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        *((kind, "token") for kind in KINDS),
        *often([(kind, "match") for kind in ONE_OF_EACH], lambda case: case[0] in ("independent", "ngram")),
    ],
)
def test_forced_rounds_predict_measured_ones(kind: str, rule: str) -> None:
    """Calls within 4 sigma and acceptance at depth 1 within 3, which is checks (b) and (c) of the verdict."""
    target = tiny(vocab=8, layers=1, hidden=8, seed=3)
    engine = Engine(target, KINDS[kind].proposer(target), verify=rule, policy=Fixed(3), rows=16)
    texts = emitted(engine, [[1, 2, 3], [4], [5, 6], [7, 1, 2, 3]] * 4, 24)
    report = check(engine, texts, Sampling(), 24)
    assert report.passed and report.calls and report.depth, report.lines()
    assert report.depth.rounds > 50 and 0 < report.depth.alpha < 1


def test_drafts_are_drawn_from_the_distributions_that_they_come_with(
    drawn_kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, at every depth; distributions sum to 1; rows are not drafted for beyond what was asked."""
    target, drawn, seen = tiny(), {}, []
    draw = DecodingRound.draw

    def noted(self: DecodingRound, probs: torch.Tensor, depth: int) -> torch.Tensor:
        drawn[depth] = probs, draw(self, probs, depth)
        return drawn[depth][1]

    monkeypatch.setattr(DecodingRound, "draw", noted)
    proposer: Proposer = drawn_kind(target)
    propose = proposer.propose

    def watched(round: Any) -> Any:
        drawn.clear()
        x, q, k, _ = proposal = propose(round)
        assert all(0 <= drafted <= asked for drafted, asked in zip(k, round.k, strict=True)) and max(k) <= x.shape[1]
        for b, j in ((b, j) for b, drafted in enumerate(k) for j in range(drafted)):
            assert 0 <= int(x[b, j]) < 32
            if q is not None:
                seen.append(float(q[b, j].sum()))
                probs, token = (part[b] for part in drawn[j]) if j in drawn else (one_hot(x[b, j], q[b, j]), x[b, j])
                if len(probs) < 32:  # drawn among the draft's own tokens
                    known = proposer.network.known  # type: ignore[attr-defined]
                    probs, token = torch.zeros_like(q[b, j]).index_copy(0, known, probs), known[token]
                assert torch.equal(q[b, j], probs) and x[b, j] == token  # without a draw, a draft is certain
        return proposal

    proposer.propose = watched  # type: ignore[method-assign]
    Engine(target, proposer, rows=4, policy=Uneven()).generate(PROMPTS, **SHORTER)
    assert torch.tensor(seen).sub(1).abs().max() < 1e-6 if seen else not any(drawn)


def test_kinds_by_name() -> None:
    for name in REGISTERED:
        assert issubclass(kind_of(name), Proposer)
    with pytest.raises(ValueError, match="there is no kind of draft 'oracle'; give one of independent"):
        kind_of("oracle")


def test_the_example_is_short() -> None:
    assert len(example_code().splitlines()) <= 60


@pytest.mark.parametrize("shape", [None, (-1, -1, 0, 0, 1)], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", often(SHAPED, EACH_WAY.__contains__))
def test_a_greedy_draft_is_certain_whatever_the_temperature(
    kind: str, shape: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its distributions are one-hot at its drafts, siblings are different tokens; those of one that samples are not."""
    target, proposals = tiny(layers=2), []
    propose = Engine.propose

    def recorded(engine: Engine, round: DecodingRound) -> Any:
        proposals.append(propose(engine, round))
        return proposals[-1]

    monkeypatch.setattr(Engine, "propose", recorded)
    for greedy in (True, False):
        proposer = KINDS[kind].proposer(target, greedy=greedy, **({"shape": shape} if shape else {}))
        engine = Engine(target, proposer, verify="tree", policy=Fixed(2), rows=2)
        proposals.clear()
        engine.generate([[1, 2, 3], [4, 5]], max_new_tokens=5, ignore_eos=True)
        distributions = [(one.q[a, :n], one.x[a, :n]) for one in proposals for a, n in enumerate(one.k) if n]
        own = torch.cat([q.gather(-1, x.unsqueeze(-1)).flatten() for q, x in distributions])
        assert len(own) > 4 and bool((own == 1).all()) == greedy, greedy
        if shape and greedy:
            first = [x[:2].tolist() for _, x in distributions if len(x) > 2]
            assert first and all(len({*pair}) == 2 for pair in first)
