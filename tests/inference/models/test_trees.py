"""Passes over trees of drafts: every node gives what its path alone gives, and `keep` makes a path a plain text."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from inference.models.lm import LM
from inference.models.passes import LAST
from inference.models.replay import Recorded
from inference.proposers.independent import store_prompts
from inference.verify.tree import MOST_NODES, Tree
from tests import standin
from tests import tiny as tinies
from tests.inference import test_families as families
from tests.inference.test_tree_families import TWELVE
from tests.often import often
from tests.trees import path_of

TEXTS = [[3, 5, 7, 3, 5, 1, 30, 2, 9], [4, 0, 4], [12, 13, 14, 15, 16, 17, 18]]
START = [len(text) - 1 for text in TEXTS]
PARENTS = [-1, 0, -1, 2, 1, 3, 3, 6]  # node 1 hangs on 0, 4 on 1; 3 on 2, 5 and 6 on 3, 7 on 6
PATH = [2, 3, 6, 7]


def test_depths_and_ancestors_are_those_of_the_parents() -> None:
    for parents in (PARENTS, [-1], [-1, 0, 1, 2], list(range(-1, MOST_NODES - 1)), [-1] * MOST_NODES):
        tree = Tree(parents)
        paths = [path_of(parents, node) for node in range(len(parents))]
        assert tree.depths.tolist() == [[0, *map(len, paths)]]
        assert tree.seen[0].tolist() == [1, *(1 + sum(2 << j for j in path) for path in paths)]


def test_impossible_trees_are_rejected() -> None:
    with pytest.raises(ValueError, match="parents: the parent of node 1 is 1; give a node before it, or -1"):
        Tree([-1, 1])
    for parents in ([], [-1] * (MOST_NODES + 1)):
        with pytest.raises(
            ValueError, match=f"parents has {len(parents)} nodes: give a tree of 1 to {MOST_NODES} nodes"
        ):
            Tree(parents)


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.inference_mode():
        yield


def tiny(**settings: Any) -> PreTrainedModel:
    with torch.inference_mode(False):  # as a user's
        return tinies.tiny(**settings)


def close(values: Tensor, wanted: Tensor, within: float = 1e-9) -> None:
    torch.testing.assert_close(values.to("cpu"), wanted.to("cpu"), rtol=within, atol=within)


def nodes(count: int, device: torch.device) -> Tensor:
    """Ids (3, N) of the nodes, siblings of which differ."""
    return ((torch.arange(3).unsqueeze(1) * 11 + torch.arange(count) * 5 + 2) % 32).to(device)


def check(lm: LM, plain: LM, shapes: list[list[int]], tree: Tree, within: float = 1e-6, after: Any = None) -> None:
    """`plain` reads each path as a text, row by row; then `keep` moves a path and both read on.
    after: settings of that pass."""
    layers = (1, LAST)
    for each in (lm, plain):
        store_prompts(each, 0, TEXTS)
    N = tree.nodes
    ids = nodes(N, lm.device)
    anchors = torch.tensor([text[-1:] for text in TEXTS], device=lm.device)
    output = lm.forward(torch.cat([anchors, ids], 1), START, states=layers, tree=tree)
    logits, states = output.logits.clone(), {layer: part.clone() for layer, part in output.states.items()}
    for row, parents in enumerate(shapes):
        for leaf in set(range(N)) - set(parents):
            path = path_of(parents, leaf)
            columns = [0, *(node + 1 for node in path)]
            text = torch.cat([anchors[row : row + 1], ids[row : row + 1, path]], 1).to(plain.device)
            wanted = plain.forward(text, [START[row]], row, states=layers)
            close(logits[row, columns], wanted.logits[0], within)
            for layer in layers:
                close(states[layer][row, columns], wanted.states[layer][0], within)
    followed(lm, plain, shapes, ids, within, after)


def followed(lm: LM, plain: LM, shapes: list[list[int]], ids: Tensor, within: float, after: Any) -> None:
    """Rows keep paths of different lengths, one of them none."""
    paths = [path_of(parents, len(parents) - 1) for parents in shapes]
    paths[1] = []
    width = max(map(len, paths))
    lm.keep(START, torch.tensor([path + [-1] * (width - len(path)) for path in paths], device=lm.device))
    ends = [start + 1 + len(path) for start, path in zip(START, paths, strict=True)]
    later = torch.tensor([[7, 9], [8, 1], [30, 2]])
    logits = lm.forward(later.to(lm.device), ends, **(after or {})).logits.clone()
    for row, (text, path) in enumerate(zip(TEXTS, paths, strict=True)):
        drafted = ids[row, path].tolist() if path else []
        plain.forward(torch.tensor([text[-1:] + drafted], device=plain.device), [START[row]], row)
        wanted = plain.forward(later[row : row + 1].to(plain.device), [ends[row]], row).logits
        close(logits[row], wanted[0], within)


def test_in_few_operations_and_in_transformers_own_forward() -> None:
    model = tiny(layers=3)
    for stock in (False, True):
        check(LM(model, 3, stock=stock), LM(model, 3, stock=True), [PARENTS] * 3, Tree(PARENTS), 1e-6)


NAMED = {*TWELVE, "Cohere2", "Gemma4Text", "Llama4Text", "Mpt"}
EVERY = [(name, settings) for name, settings, *_ in [*families.SUPPORTED, *families.BEHAVING] if name in NAMED]


OFTEN = {"Llama", "GPT2", "Gemma3Text", *families.OFTEN}


@pytest.mark.parametrize(
    ("name", "settings"), often(EVERY, lambda case: case[0] in OFTEN), ids=[name for name, _ in EVERY]
)
def test_families_with_and_without_windows(name: str, settings: dict[str, Any]) -> None:
    """Windows are of 8 positions; a path is up to 4 beyond texts of up to 9 ids."""
    with torch.inference_mode(False):
        model = families.build(name, settings)
    lm = LM(model, 3, stock=True)
    if name == "Mpt":
        with pytest.raises(ValueError, match="MptForCausalLM: its trees cannot be used here: its biases by distance"):
            check(lm, LM(model, 3, stock=True), [PARENTS] * 3, Tree(PARENTS))
        return
    check(lm, LM(model, 3, stock=True), [PARENTS] * 3, Tree(PARENTS), 1e-5)


def test_up_to_the_end_of_the_context() -> None:
    """Siblings have slots past the context, positions within it; slots never exceed context + N + 1."""
    for stock in (False, True):
        model = tiny(positions=13)
        lm, plain = LM(model, 3, stock=stock), LM(model, 3, stock=True)
        check(lm, plain, [[-1, -1, -1, 0, 1, 2]] * 3, Tree([-1, -1, -1, 0, 1, 2]), 1e-6)
        assert lm.cache.slots <= lm.context + 6 + 1


@pytest.mark.parametrize("parents", [PARENTS, [-1, 0, 1, -1, 3]], ids=["8", "5"])
def test_by_buckets(graphs_on_cpu: None, parents: list[int]) -> None:
    """8 nodes are a bucket of 17 ids, 5 one of 9: what is added changes nothing that is stored."""
    model = tiny()
    lm = LM(model, 3, graphs=True)
    check(lm, LM(model, 3, stock=True), [parents] * 3, Tree(parents), 1e-6)
    sizes = [dict(key[2:]) for key in lm.run.replay.graphs]  # type: ignore[attr-defined]
    assert {one["ids"][0] for one in sizes if "nodes" in one} == {9}


def test_graphs_of_trees_are_few_launches(graphs_on_cpu: None) -> None:
    """A pass and a move of one copy and one launch each, beside what says where the tree is; nothing is read."""
    with standin.device() as gpu:
        model = tiny().to("cuda")
        lm = LM(model, 3, graphs=True)
        tree = Tree(PARENTS)
        check(lm, LM(tiny(), 3), [PARENTS] * 3, tree, 1e-6)
        ids = torch.cat([torch.ones(3, 1, dtype=torch.int64, device="cuda"), nodes(8, lm.device)], 1)
        at, path = torch.tensor(START).to("cuda"), torch.tensor([PATH] * 3).to("cuda")
        for run, most in ((lambda: lm.forward(ids, START, at=at, tree=tree), 6), (lambda: lm.keep(START, path, at), 3)):
            run()
            gpu.clear()
            run()
            assert sum(gpu.launches.values()) <= most, gpu.launches
            assert not gpu.h2d and not gpu.d2h and sum(gpu.replays.values()) == 1
    assert not Recorded.failed
