"""The plan of trees: exact calls of a draft that is a language model, from two passes over texts."""

import pytest
import torch

from inference import Engine, Sampling
from inference.measure.tree_plan import (
    Distributions,
    Search,
    accept_of,
    distributions_of,
    reach_under,
    towards_mean,
)
from inference.measure.tree_shapes import every
from inference.models.lm import LM
from inference.policy import Fixed
from inference.proposers import Independent
from inference.verify.predict_chain import calls_from, variance_from
from inference.verify.predict_tree import rank_of
from inference.verify.tree import from_paths, paths_of
from tests.tiny import emitted, near, tiny
from tests.trees import depth, topologies

PROMPTS = [[1, 2, 3], [4], [5, 6], [7, 1, 2, 3]] * 4
SHAPE = (-1, 0, -1, 1, -1, 0, 2)


@pytest.mark.parametrize(("rule", "temperature"), [("tree", 1.0), ("traversal", 1.0), ("tree", 0.0)])
def test_calls_from_two_passes_are_those_of_the_run(rule: str, temperature: float) -> None:
    target, sampling = tiny(vocab=8, layers=1, hidden=8, seed=3), Sampling(temperature)
    draft = near(target, 0.3)
    engine = Engine(target, Independent(draft, shape=SHAPE), verify=rule, policy=Fixed(3), rows=16)
    texts = emitted(engine, PROMPTS, 20, sampling, seed=0)
    distributions = distributions_of(LM(target, 8), LM(draft, 8), texts, sampling)
    reach = reach_under(distributions, SHAPE, rule, temperature == 0)
    calls, sigma = (
        calls_from(reach, distributions.lengths).sum(),
        variance_from(reach, distributions.lengths).sum().sqrt(),
    )
    assert abs(sum(row.target_calls for row in texts.counts) - calls) <= 4 * sigma + 1e-9
    assert bool(temperature) == bool(sigma > 0)
    ends = distributions.lengths.tolist()
    late = [reach[row, t, end - t :] for row, end in enumerate(ends) for t in range(end)]
    assert rule == "tree" or not torch.cat(late).any()  # the last token is never a draft


def distributions(seed: int = 0) -> Distributions:
    """Texts of a target whose draft is right about half of the time; its second guess is often the other half."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(6, (8, 40), generator=generator)
    p = torch.nn.functional.one_hot(x, 6).float()
    rank = torch.randint(2, (8, 40), generator=generator)
    q = torch.full((8, 40, 6), 0.1).scatter(-1, x.unsqueeze(-1), 0.5)
    return Distributions(p, q, x, torch.full((8,), 40), rank)


def broad(by_depth: bool) -> Distributions:
    """Random distributions of texts that follow p, whose draft is now near and now far."""
    generator = torch.Generator().manual_seed(4)
    B, T, V, K = 12, 24, 5, 4
    p = (2 * torch.randn(B, T, V, generator=generator)).softmax(-1)
    x = torch.multinomial(p.view(-1, V), 1, generator=generator).view(B, T)
    shape = (B, T, K, V) if by_depth else (B, T, V)
    near = p.log().unsqueeze(2) if by_depth else p.log()
    q = (near + 1.2 * torch.randn(shape, generator=generator)).softmax(-1)
    rank = rank_of(q, x.unsqueeze(-1).expand(B, T, K) if by_depth else x)
    return Distributions(p.double(), q.double(), x, torch.tensor([24, 9, 17] * 4), rank)


TABLES = {
    "free": lambda parents: 1 + 1e-9 * len(parents),
    "dear": lambda parents: 1 + 2.0 * len(parents),
    "drafts": lambda parents: 1 + 0.1 * depth(parents),
    "cliff": lambda parents: 1 + 0.02 * depth(parents) + 1.0 * (len(parents) > 3),
}


@pytest.mark.parametrize("by_depth", [False, True])
def test_the_plan_is_the_best_of_all_trees(by_depth: bool) -> None:
    """Of up to five nodes, two children a node and three levels, under either rule, with either children, each rated by
    itself; nothing, chains and trees win by the costs alone."""
    result = broad(by_depth)
    trees = {from_paths(paths_of(parents)) for n in range(6) for parents in topologies(n)}
    trees = {own for own in trees if depth(own) <= 3 and max(map(own.count, own), default=0) <= 2}
    tokens, search = int(result.lengths.sum()), Search(result, 5, 2, (1, 2, 3), shrunk=0)
    taus = {}
    for parents in trees:
        for rule, likeliest in [("tree", False), ("tree", True), ("traversal", False)] if parents else []:
            reach = reach_under(result, parents, rule, likeliest)
            taus[parents, rule, likeliest] = tokens / float(calls_from(reach, result.lengths).sum())
    taus[(), "tree", False] = 1.0
    for name, seconds in TABLES.items():
        best, truth = search.ranked(seconds)[0], min(seconds(own[0]) / tau for own, tau in taus.items())
        own = from_paths(paths_of(best.parents)), best.rule, best.likeliest
        assert best.seconds <= truth * 1.01, name  # refused children are drawn
        assert best.seconds == pytest.approx(seconds(own[0]) / taus.get(own, 1.0), rel=0.01)
        assert (best.parents == ()) == (name == "dear") and (name != "cliff" or len(best.parents) <= 3)
    assert all(len(set(one.parents)) < len(one.parents) for one in search.ranked(TABLES["drafts"], True))


def test_deep_levels_have_two_children() -> None:
    result = broad(True)
    whole, cut = accept_of(result, 3, False), accept_of(result, 3, False, levels=1)
    assert torch.equal(cut[:, :, 1:, 2], torch.zeros_like(cut[:, :, 1:, 2])) and bool((cut[:, :, 0, 2] > 0).any())
    torch.testing.assert_close(cut[..., :2], whole[..., :2], rtol=1e-12, atol=0)


def test_every_tree_is_listed_once() -> None:
    wanted = {from_paths(paths_of(parents)) for n in range(1, 6) for parents in topologies(n)}
    wanted = {own for own in wanted if depth(own) <= 4 and max(map(own.count, own)) <= 3}
    result = every(5, 3, 4)
    assert len(result) == len(wanted) and set(result) == wanted


def test_chances_are_drawn_to_their_mean() -> None:
    """Of each depth and child, over the tokens that there are."""
    accept, lengths = torch.rand(2, 5, 3, 2, dtype=torch.float64), torch.tensor([5, 2])
    mean = torch.cat([accept[0], accept[1, :2]]).mean(0)
    result = towards_mean(accept, 0.25, lengths)
    torch.testing.assert_close(result, 0.75 * accept + 0.25 * mean.expand_as(accept))
    assert Search(distributions(), 4, 2, (1, 2), sorts=(True,)).accept[True].unique().numel() > 2
