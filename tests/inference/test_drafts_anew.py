"""What is drafted after a text is what a draft drafts that reads the text anew: no round leaves a state, a key or a
score of another place, row or branch behind. That would cost acceptance alone, so no text shows it."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from inference import Engine, Sampling
from inference.models.lm import WORTH
from inference.round import DecodingRound
from inference.sampling import one_hot
from inference.verify.tree import ranks_of
from tests.inference.test_every_proposer import PROMPTS, SAMPLING, Uneven
from tests.kinds import KINDS, SHAPED
from tests.often import EACH_WAY, often
from tests.tiny import tiny
from tests.trees import SHAPE

SETTINGS = [*SAMPLING[:5], Sampling(0, repetition_penalty=1.5, banned=((11,),)), *SAMPLING[6:8]]
CALL: dict[str, Any] = {"max_new_tokens": [7, 9, 8, 12, 11, 8, 9, 10], "sampling": SETTINGS, "ids": range(8)}
CASES = [(kind, "chain") for kind in KINDS if KINDS[kind].drawn]
CASES += [(kind, form) for kind in SHAPED for form in ("sampled tree", "likeliest tree")]


class Drafted(NamedTuple):
    """What a row has in a round: how many levels it was asked for, ids (N,), distributions (N, V), and parents."""

    text: list[int]
    sampling: Sampling
    asked: int
    x: list[int]
    q: Tensor
    parents: tuple[int, ...]

    def paths(self) -> Iterator[list[int]]:
        """The nodes from the anchor down to each leaf, none if nothing was drafted."""
        for leaf in {*range(len(self.x))} - {*self.parents}:
            path = [leaf]
            while self.parents[path[0]] >= 0:
                path.insert(0, self.parents[path[0]])
            yield path
        if not self.x:
            yield []


class Given:
    """Draft lengths from outside, one per row."""

    def __init__(self, asked: list[int]) -> None:
        self.asked = asked

    def lengths(self, texts: Sequence[list[int]]) -> list[int]:
        return self.asked


def rows_of(engine: Engine, rounds: int, **call: Any) -> list[Drafted]:
    """What each row has in the first rounds of a call."""
    seen = list[Drafted]()
    propose = engine.propose

    def noted(round: Any) -> Any:
        x, q, k, tree = proposal = propose(round)
        parents = tree.shape if tree else tuple(range(-1, x.shape[1] - 1))
        q = one_hot(x, torch.empty(*x.shape, 32, dtype=torch.float64)) if q is None else q
        for row, n in enumerate(k):
            text, ids = list(round.texts[row]), x[row, :n].tolist()
            seen.append(Drafted(text, round.rows[row].sampling, round.k[row], ids, q[row, :n].clone(), parents[:n]))
        return proposal

    engine.propose = noted  # type: ignore[method-assign]
    run = engine.begin(**call, ignore_eos=True)
    for _ in zip(range(rounds), engine.rounds(run), strict=False):
        assert not any(row.error for row in run.rows)
    return seen


OFTEN = {"chain": {*KINDS}, "sampled tree": EACH_WAY, "likeliest tree": {"eagle"}}


@pytest.mark.parametrize(("kind", "form"), often(CASES, lambda case: case[0] in OFTEN[case[1]]))
def test_drafts_are_those_of_a_text_read_anew(kind: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows enter, wait, leave and move, some rounds draft nothing, settings are mixed. Each node has the distribution
    that a chain along its path has; if it is certain, it has the rank there that it has among its siblings."""
    shape, greedy, target, compared = form != "chain", form == "likeliest tree", tiny(positions=64), 0
    settings = {"shape": SHAPE, "greedy": greedy} if shape else {}
    engine = Engine(target, KINDS[kind].proposer(target, **settings), verify="tree", rows=3, policy=Uneven())
    engine.generate(PROMPTS[:2], max_new_tokens=3)
    cases = [(one, path) for one in rows_of(engine, 99, prompts=PROMPTS[:8], **CALL) for path in one.paths()]
    along = torch.tensor([([one.x[node] for node in path] + [0] * 3)[:3] for one, path in cases])
    probs_of = DecodingRound.probs

    def probs(round: DecodingRound, logits: Tensor, drafted: list[Tensor]) -> Tensor:
        certain, scores = (round.temperature == 0).unsqueeze(-1), round.scores(logits, drafted)
        return torch.where(certain, scores.softmax(-1), probs_of(round, logits, drafted))

    monkeypatch.setattr(DecodingRound, "probs", probs)
    monkeypatch.setattr(DecodingRound, "draw", lambda round, probs, depth: along[:, depth])
    monkeypatch.setitem(WORTH, "cpu", 10**6)  # all are stored in one pass, in their order
    given, count = Given([one.asked for one, _ in cases]), len(cases)
    fresh = Engine(target, KINDS[kind].proposer(target), verify="tree", rows=count, policy=given)
    texts, regimes = [one.text for one, _ in cases], [one.sampling for one, _ in cases]
    again = rows_of(fresh, 1, prompts=texts, max_new_tokens=9, sampling=regimes, ids=range(count))
    for (one, path), anew in zip(cases, again, strict=True):
        assert one.text == anew.text and (len(path) <= len(anew.x) if shape else len(path) == len(anew.x))
        for depth, node in enumerate(path):
            rank, token, probs_there = ranks_of(one.parents)[node], one.x[node], anew.q[depth]
            if greedy or one.sampling.temperature == 0 or one.q[node].count_nonzero() == 1:
                assert one.q[node, token] == 1 and token == probs_there.topk(rank + 1).indices[rank]
            else:
                torch.testing.assert_close(one.q[node], probs_there, rtol=1e-6, atol=1e-9)
            compared += 1
    assert compared > 20
