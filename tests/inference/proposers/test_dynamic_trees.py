"""Trees whose shape each row's own distributions decide: exact for every shape, of a fixed number of nodes, those of
the likeliest paths among the nodes that were read."""

import math
from typing import Any

import pytest
import torch

from inference import Engine, Sampling
from inference.exactness.forced import close_edge, forced, reach_grown
from inference.exactness.verdict import check
from inference.models.lm import LM
from inference.output import Emitted
from inference.policy import Fixed
from inference.proposers import Independent
from inference.proposers.base import Proposal
from inference.proposers.trees import Dynamic, DynamicTrees
from inference.verify.tree import Tree
from tests.inference.test_distribution import p_value, pair
from tests.inference.test_every_proposer import PROMPTS, Uneven
from tests.kinds import KINDS, SHAPED
from tests.tiny import near, tiny

SHAPE = Dynamic(nodes=7, depth=3, width=2, children=3)

each_kind = pytest.mark.parametrize("kind", SHAPED)


def drafts(kind: str, target: Any, shape: Dynamic = SHAPE) -> Any:
    return KINDS[kind].proposer(target, shape=shape)


@each_kind
def test_greedy_text_is_that_of_plain_decoding(kind: str) -> None:
    """In float64: ragged rows that come and go, rounds without drafts, up to the end of the context."""
    target, whole = tiny(positions=18), {"max_new_tokens": 18, "sampling": Sampling(0)}
    plain = Engine(target, rows=2).generate(PROMPTS[:3], **whole)
    out = Engine(target, drafts(kind, target), verify="tree", rows=2, policy=Uneven()).generate(PROMPTS[:3], **whole)
    assert out.tokens == plain.tokens and out.finish == plain.finish
    assert sum(out.stats.accepted) > 0 or kind.endswith("pruned")  # with half of the tokens in its vocabulary


@pytest.mark.parametrize("kind", ["eagle", "independent"])
def test_coupled_text_is_plain_text(kind: str) -> None:
    """At mixed temperatures."""
    target = tiny(positions=20)
    whole: dict[str, Any] = {"max_new_tokens": 20, "sampling": [Sampling(1.1), Sampling(0.7, top_k=6), Sampling(0)]}
    plain = Engine(target, verify="coupled", rows=2).generate(PROMPTS[:3], **whole)
    engine = Engine(target, drafts(kind, target), verify="coupled", rows=2, policy=Uneven())
    assert engine.generate(PROMPTS[:3], **whole).tokens == plain.tokens


@pytest.mark.parametrize(("kind", "rule"), [("eagle", "tree"), ("medusa", "tree"), ("hydra", "traversal")])
def test_the_distribution_of_the_text_is_the_targets(kind: str, rule: str) -> None:
    """Three tokens of several rounds, by chi-square: distributions alone decide which nodes the tree leaves out."""
    target, _ = pair()
    assert p_value(target, drafts(kind, target, Dynamic(4, 2, 2, 3)), rule, samples=4000) > 1e-4


@pytest.mark.parametrize("kind", ["eagle", "hydra", "independent"])
def test_rows_are_as_if_alone(kind: str) -> None:
    target, mixed = tiny(positions=64), [Sampling(0.8), Sampling(0), Sampling(1.1, top_k=5)] * 2
    whole: dict[str, Any] = {"max_new_tokens": 9, "ignore_eos": True}
    many = Engine(target, drafts(kind, target), verify="tree", rows=3, policy=Uneven())
    out = many.generate(PROMPTS[:6], sampling=mixed, ids=range(6), **whole)
    one = Engine(target, drafts(kind, target), verify="tree", rows=1, policy=Uneven())
    for n in range(0, 6, 2):
        alone = one.generate([PROMPTS[n]], sampling=mixed[n], ids=[n], **whole)
        assert (out.tokens[n], out.stats.rows[n]) == (alone.tokens[0], alone.stats.rows[0]), n


def test_a_draft_equal_to_the_target_is_always_accepted() -> None:
    """All paths of two children are in the tree: of accepted nodes those that were read stay stored, and no others."""
    target = tiny()
    engine = Engine(target, Independent(target, shape=Dynamic(14, 3, 4, 2)), verify="tree", policy=Fixed(3), rows=3)
    out = engine.generate(PROMPTS[:3], max_new_tokens=28, sampling=Sampling(0), ignore_eos=True)
    assert out.stats.accepted == out.stats.drafted and out.stats.target_calls == 3 * 7


def chosen(model: Any, text: list[int], shape: Dynamic, levels: int) -> list[tuple[int, ...]]:
    """The paths of EAGLE-2's tree, one by one."""
    passes: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    candidates: list[tuple[tuple[int, ...], float]] = []
    for _ in range(min(levels, shape.depth)):
        level = []
        for path, score in passes:
            probs = model(torch.tensor([text + list(path)])).logits[0, -1].log_softmax(-1)
            top = probs.topk(shape.children)
            level += [((*path, int(x)), score + float(v)) for x, v in zip(top.indices, top.values, strict=True)]
        candidates += level
        passes = sorted(level, key=lambda one: -one[1])[: shape.width]
    return sorted(path for path, _ in sorted(candidates, key=lambda one: -one[1])[: shape.nodes])


class Climbing:
    """Levels 1, 2 and 4 in one batch, by the length of the text."""

    def lengths(self, texts: list[list[int]]) -> list[int]:
        return [(4, 1, 4, 2)[len(text) % 4] for text in texts]


SHAPES = [Dynamic(4, 3, 2, 3), Dynamic(9, 3, 1, 3), Dynamic(18, 4, 3, 2), Dynamic(30, 2, 9, 4)]


@pytest.mark.parametrize("shape", SHAPES, ids=["4", "9", "18", "30"])
def test_the_tree_is_that_of_the_likeliest_paths(shape: Dynamic, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every round, after accepted paths; with another number of levels in each row; one pass a level."""
    target, passes, checked = tiny(layers=1), 0, 0
    proposer = Independent(near(target, 0.02), shape=shape)
    propose, forward = proposer.propose, LM.forward

    def counted(lm: LM, *given: Any, **settings: Any) -> Any:
        nonlocal passes
        passes += lm is proposer.lm
        return forward(lm, *given, **settings)

    def watched(round: Any) -> Any:
        nonlocal passes, checked
        passes = 0
        x, _, k, tree = proposal = propose(round)
        assert passes == min(max(round.k), shape.depth)
        for row, text in enumerate(round.texts):
            paths: list[tuple[int, ...]] = []
            for node in range(k[row]):
                parent = int(tree.parents[row, node])
                paths.append((*(paths[parent] if parent >= 0 else ()), int(x[row, node])))
            assert sorted(paths) == chosen(proposer.model, text, shape, round.k[row])
            checked += 1
        return proposal

    monkeypatch.setattr(LM, "forward", counted)
    monkeypatch.setattr(proposer, "propose", watched)
    with torch.inference_mode():
        engine = Engine(target, proposer, verify="tree", rows=2, policy=Climbing())
        out = engine.generate(PROMPTS[:2], max_new_tokens=48, sampling=[Sampling(0), Sampling(0.8)])
    assert checked > 20 and sum(out.stats.accepted[1:]) > 10, out.stats.accepted


def test_sizes_of_rounds() -> None:
    trees = DynamicTrees(Dynamic(nodes=9, depth=3, width=4, children=3))
    assert trees.counts == [0, 3, 12, 24] and trees.nodes([0, 1, 2, 3, 9]) == [0, 3, 9, 9, 9]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [((0, 1, 1, 1), "shape: nodes=0 must be at least 1"), ((63, 1, 1, 1), "nodes is 63; a pass reads at most 62"),
     ((9, 8, 9, 2), r"\(depth - 1\) \* width is 63; a pass reads at most 62"),
     ((9, 2, 2, 40), "children=40, but there are 32 tokens")],
)  # fmt: skip
def test_sizes_that_cannot_be_drafted_raise(sizes: tuple[int, int, int, int], message: str) -> None:
    target = tiny(layers=1)
    with pytest.raises(ValueError, match=message):
        Engine(target, Independent(target, shape=Dynamic(*sizes)), verify="tree").generate([[1]], max_new_tokens=3)


@pytest.mark.parametrize(("kind", "rule", "temperature"), [
    ("independent", "tree", 1.0), ("independent", "traversal", 0.0), ("eagle", "tree", 0.7), ("hydra", "tree", 1.0),
    ("medusa", "tree", 0.7), ("parallel", "tree", 1.0), ("early_exit", "tree", 1.0), ("eagle, pruned", "tree", 1.0),
])  # fmt: skip
def test_calls_are_predicted_to_the_call(kind: str, rule: str, temperature: float) -> None:
    """Given the text nothing is random: the tree of each round follows from the text before it. Acceptance at depth 1
    too, and the whole verdict passes."""
    target, sampling = tiny(vocab=8, layers=1, hidden=8, seed=3), Sampling(temperature)
    engine = Engine(target, drafts(kind, target, Dynamic(6, 3, 2, 3)), verify=rule, policy=Climbing(), rows=4)
    prompts = [[1, 2, 3], [4], [5, 6], [7, 1, 2, 3]] * 2
    out = engine.generate(prompts, max_new_tokens=20, sampling=sampling, seed=5, ids=range(8), ignore_eos=True)
    texts = Emitted(prompts, list(range(8)), out.tokens, out.stats.rows)
    verdict = check(engine, texts, sampling, 20)
    assert verdict.calls and verdict.depth and verdict.passed, verdict.lines()
    assert verdict.calls.measured == verdict.calls.predicted and verdict.calls.sigma == verdict.calls.near == 0
    assert verdict.depth.measured == verdict.depth.alpha and 0 < verdict.depth.alpha <= 1
    assert sum(out.stats.accepted[1:]) > 0


def test_a_choice_that_rounding_could_change_is_near() -> None:
    """Of the candidates that a tree selects, of those that it reads, and of the children of a node."""
    target = tiny(vocab=8, layers=1, hidden=8, seed=3)
    engine = Engine(target, drafts("independent", target, Dynamic(6, 3, 2, 3)), verify="tree", policy=Fixed(3), rows=4)
    prompts = [[1, 2, 3], [4]]
    out = engine.generate(prompts, max_new_tokens=12, ids=range(2), ignore_eos=True)
    texts = Emitted(prompts, [0, 1], out.tokens, out.stats.rows)
    drafting = sum(k > 0 for k in forced(engine, texts, Sampling(), 12).k.flatten().tolist())
    near = [forced(engine, texts, Sampling(), 12, noise).near for noise in (0.0, 0.03, 1e9)]
    assert near[0] == 0 < near[1] < near[2] == drafting


@pytest.mark.parametrize(("scores", "count", "near"), [
    ([3.0, 1.0, 0.9], 2, True), ([3.0, 2.95, 0.9], 2, False), ([3.0, 2.95, 0.9], 1, True), ([3.0, 2.95, 0.9], 3, False),
    ([3.0, 1.0, -math.inf], 2, False), ([-math.inf] * 3, 1, False),
])  # fmt: skip
def test_only_the_edge_of_a_selection_is_close(scores: list[float], count: int, near: bool) -> None:
    assert close_edge(torch.tensor([scores]), count, 0.2).tolist() == [near]


def test_a_grown_tree_accepts_the_text_as_far_as_it_is_a_path() -> None:
    """Rows of two shapes: the second row has only two nodes; the third's text ends after one token."""
    tree = Tree(torch.tensor([[-1, -1, 0, 2], [-1, 0, 1, 2], [-1, 0, 1, 2]]))
    ids = torch.tensor([[5, 6, 7, 8], [5, 7, 8, 9], [5, 7, 8, 9]])
    x = torch.tensor([[5, 7, 9], [5, 7, 8], [5, 7, 8]])
    inside = torch.tensor([[True] * 3, [True] * 3, [True, False, False]])
    reach = reach_grown(Proposal(ids, None, [4, 2, 4], tree), x, inside, torch.tensor([4, 2, 4]))
    assert reach.tolist() == [[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 0, 0]]
