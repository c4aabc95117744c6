"""Rounds whose proposal is a tree: the accepted path becomes the text, its keys and values and states stay."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from inference import Engine, Sampling
from inference.models.passes import LAST
from inference.policy import Fixed
from inference.proposers.base import Outcome, Proposal, Proposer
from inference.verify.rules import Rule
from inference.verify.tree import Tree
from tests import standin
from tests.tiny import tiny

PROMPTS = [[3, 5, 7], [2], [9, 1, 4, 4, 8], [6, 6]]
PARENTS = (-1, -1, 0, 1)  # two children, each with one of its own


class Walked(NamedTuple):
    accepted: Tensor
    path: Tensor
    probs: Tensor


def walk(p: Tensor, q: Tensor | None, x: Tensor, u: Tensor, k: Tensor, tree: Tree) -> Walked:
    """Down to each child that is the likeliest token: exact at temperature 0."""
    y, rows = p.argmax(-1), torch.arange(len(x), device=x.device)
    parents = tree.on(x.device).parents.expand(len(x), -1)
    used = torch.arange(x.shape[1], device=x.device) < k.unsqueeze(1)
    at, path = torch.full_like(k, -1), []
    for _ in range(2):
        fits = used & (parents == at.unsqueeze(1)) & (x == y.gather(1, parents + 1))
        node = torch.where(fits.any(1), fits.to(torch.uint8).argmax(1), -1)
        path.append(node)
        at = torch.where(node >= 0, node, torch.where(at == -1, -2, at) if len(path) == 1 else at)
    nodes = torch.stack(path, 1)
    return Walked((nodes >= 0).sum(1), nodes, p[rows, nodes.amax(1).clamp(min=-1) + 1])


WALK = Rule("walk", walk, lambda *given: None, trees=True)


class Scripted(Proposer):
    """Knows the texts, by what they begin with: the right tokens are nodes 1 and 3, node 0 is wrong and so is 2; every
    third token it is wrong about node 1 too."""

    reads = (LAST,)

    def __init__(self, texts: list[list[int]]) -> None:
        self.texts, self.seen = texts, []

    def propose(self, round):
        tails = []
        for text in round.texts:
            (whole,) = [whole for whole in self.texts if whole[: len(text)] == text]
            right = (whole[len(text) :] + [0, 0])[:2]
            tails.append([right[0] ^ 1, right[0] ^ (len(text) % 3 == 0), right[1], right[1]])
        self.ends = [len(text) for text in round.texts]
        k = [(0, 2, 4)[min(k, 2)] for k in round.k]
        round.send(k)
        return Proposal(torch.tensor(tails), None, k, Tree(PARENTS))

    def commit(self, outcome: Outcome) -> None:
        self.seen.append((self.ends, outcome.accepted.tolist(), outcome.states[LAST].detach().cpu().clone()))


PENALISED = Sampling(0, repetition_penalty=1.4, banned=((3, 5), (2,)))


@pytest.mark.parametrize(
    ("device", "sampling"),
    [("cpu", Sampling(0)), ("cpu", PENALISED), ("cuda", PENALISED)],
    ids=["cpu-sampling0", "cpu-sampling1", "cuda-sampling1"],
)
def test_the_path_that_is_accepted_is_the_text(
    device: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.models.replay.WARMUP", 1)
    target = tiny(hidden=32, seed=27)
    limits = {"max_new_tokens": [14, 20, 9, 17], "sampling": sampling}
    plain = Engine(target, rows=2).generate(PROMPTS, **limits).tokens
    whole = [prompt + text for prompt, text in zip(PROMPTS, plain, strict=True)]
    with standin.device():
        here = tiny(hidden=32, seed=27).to(device)
        engine = Engine(here, Scripted(whole), verify=WALK, policy=Fixed(2), rows=2)
        out = engine.generate(PROMPTS, **limits)
    assert out.tokens == plain
    assert out.stats.accepted[0] > out.stats.accepted[1] > 5 and out.stats.target_calls < 45


def test_a_rule_for_chains_rejects_trees() -> None:
    engine = Engine(tiny(), Scripted([PROMPTS[0] + [1] * 9]), policy=Fixed(2))
    with pytest.raises(ValueError, match="verify=token verifies only chains, but Scripted drafts trees"):
        engine.generate(PROMPTS[:1], max_new_tokens=6)
