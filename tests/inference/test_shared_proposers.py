"""One proposer that serves engines of other sizes in turn drafts for each as a new one would: nothing of an earlier
engine, or of an earlier call, is left."""

from typing import Any

import pytest

from inference import Engine, Sampling
from inference.policy import Fixed
from inference.proposers import Independent
from tests.kinds import KINDS
from tests.tiny import near, record_on_cpu, tiny

PROMPTS = [[1, 2, 3, 1, 2], [4], [5, 6, 5, 6], [7, 8], [9, 9, 9]]


class Short:
    """A tokenizer of fewer ids than the target has rows."""

    pad_token_id = None

    def get_vocab(self) -> dict[str, int]:
        return {str(number): number for number in range(24)}

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


# neighbours differ in one size: context, rows, vocabulary; the second in none, but it has a cache of its own
SIZES: list[dict[str, Any]] = [
    {"rows": 2, "context": 14},
    {"rows": 2, "context": 14},
    {"rows": 2, "context": 40},
    {"rows": 3, "context": 40},
    {"rows": 3, "context": 40, "tokenizer": Short()},
    {"rows": 3, "context": 40, "tokenizer": Short(), "graphs": False},
]


@pytest.mark.thorough
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("kind", [name for name in KINDS if not name.endswith("greedy")])
def test_a_proposer_is_as_new_for_each_engine(kind: str, recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if recorded:
        record_on_cpu(monkeypatch)
        monkeypatch.setattr("inference.models.replay.WARMUP", 1)
    target = tiny(positions=64)
    shared, regime = KINDS[kind].proposer(target), Sampling(0.7)
    for n, sizes in enumerate(SIZES):
        results = []
        for proposer in (shared, KINDS[kind].proposer(target)):
            out = Engine(target, proposer, policy=Fixed(2), **sizes).generate(
                PROMPTS, max_new_tokens=[10, 3, 6, 10, 5], sampling=regime, seed=n, ignore_eos=True
            )
            results.append((out.tokens, out.finish, out.stats.drafted, out.stats.accepted, out.errors))
        assert results[0] == results[1], sizes
        if isinstance(shared, Independent):
            assert shared.lm.graphs == (recorded and sizes.get("graphs", True))


@pytest.mark.thorough
def test_a_proposer_serves_one_engine_at_a_time() -> None:
    run: dict[str, Any] = {"max_new_tokens": 16, "seed": 3, "ignore_eos": True}
    proposer = Independent(near(tiny()))
    first, second = Engine(tiny(), proposer, rows=2), Engine(tiny(seed=5), proposer, rows=2)
    wanted = [engine.generate(PROMPTS, **run).tokens for engine in (first, second)]
    assert [engine.generate(PROMPTS, **run).tokens for engine in (first, second)] == wanted
    stream = first.stream(PROMPTS[0], max_new_tokens=30)
    next(stream)
    next(second.stream(PROMPTS[0]))
    with pytest.raises(RuntimeError, match="another engine's call took this engine's proposer"):
        next(stream)
