"""A tree that was planned: it is kept by the draft folder, served from there, and measured as it is served."""

import json
import shutil
from pathlib import Path

import pytest

from inference import Engine, load
from inference.drafts.draft_folder import Metadata, read, save
from inference.drafts.planned_tree import PlannedTree
from inference.loading import takes_shape
from inference.policy import Fixed
from inference.proposers import Independent, NGram
from tests.folders import network, target_folder, tokenizer

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
