"""What a gate is counted from: the model's rounds of held-out texts."""

from inference import Engine, Sampling
from inference.measure.gating import places_of
from inference.policy import Fixed
from inference.proposers import Independent
from inference.proposers.retrieval import Retrieval
from tests.tiny import near, tiny

K, TOKENS = 4, 12


def test_rounds_that_drafted_all_are_counted_and_no_others() -> None:
    """Near the end of a text fewer are drafted, and a round that ends it whole is one of all."""
    engine = Engine(tiny(), Independent(near(tiny())), policy=Fixed(K), rows=8)
    prompts = [[3, token] for token in range(2, 26)]
    out = engine.generate(prompts, max_new_tokens=TOKENS, sampling=Sampling(), ignore_eos=True).whole()
    places = [p for row, prompt in enumerate(prompts) for p in places_of(Retrieval(), prompt, out, row, K)]
    found = [place.accepted for place in places if place.accepted is not None]
    assert len(found) == out.stats.drafted[K - 1] < out.stats.drafted[0]
    assert found.count(K) == out.stats.accepted[K - 1] > 0
    ended = [row for row in out.stats.rows if row.starts[-1] + K + 1 == TOKENS and row.accepted[K - 1]]
    assert ended  # with a round that was accepted whole
