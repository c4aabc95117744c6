"""A tree that was planned: it is kept by the draft folder, served from there, and measured as it is served."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from inference import Engine, Sampling, load
from inference.drafts.draft_folder import Metadata, read, save
from inference.drafts.planned_tree import PlannedTree
from inference.exactness.checks import check
from inference.exactness.teacher_forced import teacher_forced
from inference.exactness.tree_passes import routes, tree_of
from inference.loading import takes_shape
from inference.measure.timing import Emitted
from inference.models.passes import Pass, Tree
from inference.noise import row_ids
from inference.policy import Fixed
from inference.proposers import Independent, NGram
from inference.proposers.topology import chain
from tests.folders import network, target_folder, tokenizer
from tests.tiny import near, tiny

TREE = PlannedTree((-1, -1, 0, 0, 1), "traversal")
TEXT = "the record"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and a draft of its own weights that was planned with a tree."""
    root = tmp_path_factory.mktemp("planned")
    metadata = Metadata({"name": str(target_folder(root / "target")), "config": None, "tokenizer": None}, 3, tree=TREE)
    save(network(), tokenizer(), root / "draft", metadata, None)
    return root


def changed(folder: Path, to: Path, **keys: object) -> Path:
    """A copy of a draft folder with other metadata; None: without the key."""
    shutil.copytree(folder, to)
    values = json.loads((to / "cotrain.json").read_text()) | keys
    kept = {name: value for name, value in values.items() if value is not None}
    (to / "cotrain.json").write_text(json.dumps(kept | {"report": None}))
    return to


def served(engine: Engine) -> tuple[object, ...]:
    """Rule, policy, shape and children."""
    assert isinstance(engine.proposer, Independent)
    branching = engine.proposer.branching
    return engine.rule.name, engine.policy, branching and branching.parents, engine.proposer.greedy


def test_a_folder_says_which_tree_it_was_planned_with(place: Path, tmp_path: Path) -> None:
    found = read(place / "draft").metadata
    assert found and found.tree == TREE and (TREE.depth, TREE.most_children, found.k) == (2, 2, 3)
    older = read(changed(place / "draft", tmp_path / "older", tree=None)).metadata
    assert older and older.tree is None


def test_a_folder_is_served_as_it_was_planned(place: Path, tmp_path: Path) -> None:
    assert served(load(place / "draft")) == ("traversal", Fixed(2), (-1, -1, 0, 0, 1), False)
    assert served(load(place / "draft", verify="coupled"))[2] == (-1, -1, 0, 0, 1)
    likeliest = {"parents": [-1, -1], "rule": "tree", "likeliest": True}
    folder = changed(place / "draft", tmp_path / "likeliest", tree=likeliest)
    assert served(load(folder)) == ("tree", Fixed(1), (-1, -1), True)


def test_rounds_of_a_folder_draft_its_nodes(place: Path) -> None:
    """The draft is the target: rounds accept two levels of three and emit three tokens."""
    stats = load(place / "draft").generate([TEXT], max_new_tokens=30, ignore_eos=True).stats
    assert stats.target_calls == 10 and stats.drafted[0] == stats.accepted[0]


def test_a_policy_or_a_rule_of_chains_drafts_chains(place: Path) -> None:
    assert served(load(place / "draft", policy=Fixed(4))) == ("token", Fixed(4), None, False)
    assert served(load(place / "draft", verify="block")) == ("block", Fixed(3), None, False)


def test_a_kind_that_drafts_chains_alone_refuses_a_tree(place: Path, tmp_path: Path) -> None:
    assert takes_shape(Independent) and not takes_shape(NGram)
    folder = changed(place / "draft", tmp_path / "ngram", kind="ngram")
    with pytest.raises(ValueError, match=r"cotrain\.json: tree: ngram drafts chains alone"):
        load(folder)


# --- what is timed is what is checked


SHAPE = (-1, 0, -1, 1, -1, 0, 2, 2, 6)  # uneven, and not numbered level by level


def run(engine: Engine, temperature: float = 1.0) -> Emitted:
    prompts = [[1, 2, 3], [4], [5, 6], [7, 8, 9]]
    keys = row_ids(prompts)
    out = engine.generate(prompts, max_new_tokens=16, sampling=Sampling(temperature), ids=keys, ignore_eos=True)
    return Emitted(prompts, keys, out.tokens, out.stats.rows)


def drafting(shape: tuple[int, ...] | None = SHAPE) -> Engine:
    target = tiny()
    rule = "tree" if shape else "token"
    return Engine(target, Independent(near(target), shape=shape), verify=rule, policy=Fixed(3), rows=4)


def test_the_shape_is_found_in_a_round() -> None:
    assert tree_of(drafting(), [1, 2]) == (-1, -1, -1, 0, 0, 1, 1, 3, 5)  # level by level
    assert tree_of(drafting(None), [1, 2]) is tree_of(drafting(chain(3)), [1, 2]) is None


def test_routes_come_to_every_node() -> None:
    ways = routes(SHAPE)
    found = [next(ways) for _ in range(5)]
    assert found == [(0, 1, 3), (2, 6, 8), (0, 5), (2, 7), (4,)] and next(ways) == found[0]
    assert {node for way in found for node in way} == set(range(9))


@pytest.mark.parametrize("shape", [SHAPE, (-1, -1, -1), (-1, 0, 0, 1, 2)])
def test_passes_over_trees_give_the_logits_of_whole_texts(shape: tuple[int, ...]) -> None:
    """Ragged texts, route after route: what a pass accepts is what the next one stands on."""
    target, texts = tiny(), [list(range(1, 21)), list(range(5, 22)), [9] * 9]
    prompts = [[1, 2, 3], [4], [5, 6]]
    passes = teacher_forced(target, prompts, texts, Sampling(), block=4, tree=shape)
    found = torch.cat([part.logits for part in passes], 1)
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        wanted = target(torch.tensor([prompt + text[:-1]])).logits[0, len(prompt) - 1 :]
        torch.testing.assert_close(found[row, : len(text)], wanted, rtol=1e-9, atol=1e-9)


def test_an_engine_that_drafts_trees_is_checked_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target whose passes over trees are wrong, those over chains not, fails (d); its texts differ by no tie."""
    engine = drafting()
    texts = run(engine)
    assert check(engine, texts, Sampling(), 16).passed
    forward = engine.target.forward

    def wrong(ids: torch.Tensor, *args: Any, tree: Tree | None = None, **settings: Any) -> Pass:
        found = forward(ids, *args, tree=tree, **settings)
        return found if tree is None else found._replace(logits=found.logits * 1.01)

    monkeypatch.setattr(engine.target, "forward", wrong)
    verdict = check(engine, texts, Sampling(), 16)
    assert verdict.logits and not verdict.logits.passed and verdict.logits.one < 1e-9 < verdict.logits.many
    assert verdict.text.noise > 1e-3  # that of passes over trees
