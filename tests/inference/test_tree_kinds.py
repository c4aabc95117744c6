"""Trees that every kind with a `shape` drafts: exact, batched and ragged, with the distributions that its chains have;
their calls are those that forced rounds predict. A kind is tested here once `tests.kinds` has a maker for it."""

import inspect
from typing import Any

import pytest
import torch

from inference import Engine, Sampling
from inference.exactness.forced import forced
from inference.measure.costs import spans_of
from inference.measure.tree_plan import distributions_of_rounds, reach_under
from inference.policy import Fixed
from inference.proposers import KINDS as REGISTERED
from inference.proposers import kind_of
from inference.proposers.base import Proposer
from inference.verify.predict_chain import calls_from, variance_from
from inference.verify.tree import chain
from tests import standin
from tests.inference.test_distribution import p_value, pair
from tests.inference.test_every_proposer import LIMITS, PROMPTS, SAMPLING, WHOLE, Uneven
from tests.kinds import KINDS, SHAPED
from tests.often import EACH_WAY, often
from tests.tiny import emitted, tiny
from tests.trees import SHAPE

TWO = (-1, -1, 0, 0, 1, 2)  # no more than two children of a node: predicted to the last bit

each_kind = pytest.mark.parametrize("kind", SHAPED)


def drafts(kind: str, target: Any, shape: tuple[int, ...] = SHAPE, **settings: Any) -> Proposer:
    return KINDS[kind].proposer(target, shape=shape, **settings)


def test_every_kind_that_takes_a_shape_is_here() -> None:
    for name in REGISTERED:
        takes_shape = "shape" in inspect.signature(kind_of(name).__init__).parameters
        assert takes_shape == kind_of(name).drafts_trees and (name in SHAPED or not takes_shape), name
    assert len(SHAPED) > 5


@pytest.mark.thorough
@each_kind
def test_the_distribution_of_the_text_is_the_targets(kind: str) -> None:
    """Three tokens of several rounds, by chi-square. Trees of likeliest tokens have no distribution of their own: that
    theirs are certain is in `test_every_proposer`, and what rules make of such trees in `test_tree_drafts`."""
    target, _ = pair()
    assert p_value(target, drafts(kind, target, (-1, -1, 0, 0, 1)), "traversal", samples=4000) > 1e-4


@pytest.mark.parametrize("kind", often(SHAPED, EACH_WAY.__contains__))
def test_greedy_text_is_that_of_plain_decoding(kind: str) -> None:
    """Ragged rows that come and go, rounds without drafts, prompts of one token, up to the end of the context."""
    target, whole = tiny(positions=18), {"max_new_tokens": 18, "sampling": Sampling(0)}
    plain = Engine(target, rows=2).generate(PROMPTS[:3], **whole)
    out = Engine(target, drafts(kind, target), verify="traversal", rows=2, policy=Uneven()).generate(
        PROMPTS[:3], **whole
    )
    assert out.tokens == plain.tokens and out.finish == plain.finish
    assert sum(out.stats.accepted) > 0 or kind.endswith("pruned")  # which knows half of the tokens


@pytest.mark.parametrize("kind", often(["independent", "eagle", "parallel"], {"eagle"}.__contains__))
def test_rows_are_as_if_alone(kind: str) -> None:
    """Rows enter, wait in spare slots, leave and move; settings, with histories and temperature 0 among them, and
    levels are mixed."""
    target, limits = tiny(positions=64), [min(limit, 9) for limit in LIMITS]
    many, one = (Engine(target, drafts(kind, target), verify="tree", rows=n, policy=Uneven()) for n in (4, 1))
    out = many.generate(PROMPTS, **WHOLE | {"max_new_tokens": limits})
    for n, prompt in list(enumerate(PROMPTS))[::3]:
        alone = one.generate([prompt], max_new_tokens=limits[n], sampling=SAMPLING[n], ids=[n], ignore_eos=True)
        assert (out.tokens[n], out.stats.rows[n]) == (alone.tokens[0], alone.stats.rows[0]), n
    assert sum(out.stats.accepted) > 0


@pytest.mark.thorough
@each_kind
def test_text_on_a_device_is_that_of_the_host(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With passes, drafts and verdicts recorded there, in two calls of other rows and another seed."""
    monkeypatch.setattr("inference.models.replay.WARMUP", 1)
    host, outs = tiny(), []
    calls: list[dict[str, Any]] = [{"sampling": SAMPLING[:3], "seed": n, "ids": range(n, n + 3)} for n in (0, 5)]
    engine = Engine(host, drafts(kind, host), verify="tree", rows=2, policy=Fixed(2))
    wanted = [engine.generate(PROMPTS[:3], max_new_tokens=6, **call) for call in calls]
    with standin.device():
        target = tiny().to("cuda")
        engine = Engine(target, drafts(kind, target), verify="tree", rows=2, policy=Fixed(2))
        outs = [engine.generate(PROMPTS[:3], max_new_tokens=6, **call) for call in calls]
    assert [one.tokens for one in outs] == [one.tokens for one in wanted]
    assert [one.stats.accepted for one in outs] == [one.stats.accepted for one in wanted]


@pytest.mark.parametrize(("kind", "most"), [("medusa", 3), ("hydra", 3), ("p_eagle", 3), ("parallel", 4)])
def test_no_deeper_than_was_learnt(kind: str, most: int) -> None:
    """Chains end there, trees of more levels are refused."""
    target = tiny()
    chains = KINDS[kind].proposer(target)
    out = Engine(target, chains, policy=Fixed(7), rows=2).generate(PROMPTS[:3], max_new_tokens=20, ignore_eos=True)
    assert len(out.stats.drafted) == most and spans_of(chains) == (2, most)
    with pytest.raises(
        ValueError, match=f"shape: the tree has {most + 1} levels, but the draft has at most {most}: give "
    ):
        Engine(target, drafts(kind, target, chain(most + 1)), verify="tree").generate([[1, 2]], max_new_tokens=4)


@pytest.mark.parametrize(
    ("kind", "temperature"),
    [
        *often([(kind, 1.0) for kind in SHAPED], lambda case: case[0] in EACH_WAY),
        ("independent", 0.0),
        pytest.param("medusa", 0.0, marks=pytest.mark.thorough),
    ],
)
def test_distributions_by_depth_say_what_every_shape_accepts(kind: str, temperature: float) -> None:
    """From chains alone: what forced rounds of the trees say round by round, and calls within 4 sigma of those made."""
    target, sampling = tiny(vocab=8, layers=1, hidden=8, seed=3), Sampling(temperature)
    engine = Engine(target, drafts(kind, target, TWO), verify="tree", policy=Fixed(3), rows=8)
    texts = emitted(engine, [[1, 2, 3], [4]] * 4, 16, sampling)
    distributions = distributions_of_rounds(engine, KINDS[kind].proposer(target), 3, texts, sampling, 16)
    reach, wanted = reach_under(distributions, TWO, "tree", temperature == 0), forced(engine, texts, sampling, 16).reach
    torch.testing.assert_close(reach.double(), wanted, rtol=1e-4, atol=1e-5)
    calls, sigma = (
        calls_from(reach, distributions.lengths).sum(),
        variance_from(reach, distributions.lengths).sum().sqrt(),
    )
    assert abs(sum(row.target_calls for row in texts.counts) - calls) <= 4 * sigma + 1e-3
    assert bool(temperature) == bool(sigma > 0)
