"""A tree that was planned: it is kept by the draft folder, served from there, and measured as it is served."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cotrain.bench import measurement
from cotrain.bench.measurement import recorded
from cotrain.config.groups import Bench
from cotrain.data.splits import Prompts
from cotrain.planning import planner
from cotrain.planning.forecast import Forecast, TreeForecast
from cotrain.planning.plan import Plan
from cotrain.planning.planner import (
    advice,
    best_tree,
    candidate_trees,
    choice_line,
    plain_distributions,
    plain_texts,
    plan_entries,
    served_tree,
    tree_calls,
    tree_search,
)
from inference import Engine, Sampling, load
from inference.drafts.draft_folder import Metadata, PlannedTree, save
from inference.exactness.teacher_forced import routes, teacher_forced, tree_of
from inference.exactness.verdict import check
from inference.measure.costs import Costs, RealRound
from inference.measure.timing import Interval
from inference.measure.tree_shapes import fitted_seconds, probes
from inference.models.passes import Pass
from inference.output import Emitted
from inference.policy import Fixed
from inference.proposers import Independent, NGram
from inference.proposers.heads import Medusa, MedusaConfig, MedusaNetwork
from inference.verify.tree import Tree, chain, depths_of, full
from tests.bench_stubs import chains_of, rates_of
from tests.folders import network, target_folder, tokenizer
from tests.settings import resized
from tests.tiny import emitted, near, tiny
from tests.trees import SHAPE

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
    retained = {name: value for name, value in values.items() if value is not None}
    (to / "cotrain.json").write_text(json.dumps(retained | {"report": None}))
    return to


def served(engine: Engine) -> tuple[object, ...]:
    """Rule, policy, shape and children."""
    assert isinstance(engine.proposer, Independent)
    branching = engine.proposer.branching
    return engine.rule.name, engine.policy, branching and branching.parents, engine.proposer.greedy


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
    assert Independent.drafts_trees and not NGram.drafts_trees
    folder = changed(place / "draft", tmp_path / "ngram", kind="ngram")
    with pytest.raises(
        ValueError, match=r"cotrain\.json: tree must be null: a draft of kind 'ngram' drafts chains, no trees"
    ):
        load(folder)


# --- what is timed is what is checked


def run(engine: Engine, temperature: float = 1.0) -> Emitted:
    return emitted(engine, [[1, 2, 3], [4], [5, 6], [7, 8, 9]], 8, Sampling(temperature), seed=0)


def drafting(shape: tuple[int, ...] | None = SHAPE) -> Engine:
    target = tiny()
    rule = "tree" if shape else "token"
    return Engine(target, Independent(near(target), shape=shape), verify=rule, policy=Fixed(3), rows=4)


def test_a_round_shows_the_shape() -> None:
    assert tree_of(drafting(), [1, 2]) == (-1, -1, -1, 0, 0, 1, 1, 3, 5)  # level by level
    assert tree_of(drafting(None), [1, 2]) is tree_of(drafting(chain(3)), [1, 2]) is None


def test_routes_come_to_every_node() -> None:
    ways = routes(SHAPE)
    result = [next(ways) for _ in range(5)]
    assert result == [(0, 1, 3), (2, 6, 8), (0, 5), (2, 7), (4,)] and next(ways) == result[0]
    assert {node for way in result for node in way} == set(range(9))


@pytest.mark.parametrize("shape", [SHAPE, (-1, -1, -1), (-1, 0, 0, 1, 2)])
def test_passes_over_trees_give_the_logits_of_whole_texts(shape: tuple[int, ...]) -> None:
    """Ragged texts, route after route: what a pass accepts is what the next one stands on."""
    target, texts = tiny(), [list(range(1, 21)), list(range(5, 22)), [9] * 9]
    prompts = [[1, 2, 3], [4], [5, 6]]
    passes = teacher_forced(target, prompts, texts, Sampling(), block=4, tree=shape)
    result = torch.cat([part.logits for part in passes], 1)
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        wanted = target(torch.tensor([prompt + text[:-1]])).logits[0, len(prompt) - 1 :]
        torch.testing.assert_close(result[row, : len(text)], wanted, rtol=1e-9, atol=1e-9)


def test_an_engine_that_drafts_trees_is_checked_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target whose passes over trees are wrong, those over chains not, fails (d); its texts differ by no tie."""
    engine = drafting()
    texts = run(engine)
    assert check(engine, texts, Sampling(), 8).passed
    forward = engine.target.forward

    def wrong(ids: torch.Tensor, *args: Any, tree: Tree | None = None, **settings: Any) -> Pass:
        result = forward(ids, *args, tree=tree, **settings)
        return result if tree is None else result._replace(logits=result.logits * 1.01)

    monkeypatch.setattr(engine.target, "forward", wrong)
    verdict = check(engine, texts, Sampling(), 8)
    assert verdict.logits and not verdict.logits.passed and verdict.logits.one < 1e-9 < verdict.logits.many
    assert verdict.text.noise > 1e-3  # that of passes over trees


# --- the plan


def test_costs_of_trees_are_those_of_rounds_that_were_run() -> None:
    """Drafting by levels and nodes that are read, target and rest by the table at the level of rounds."""
    table = Costs(tuple(1 + 0.1 * n for n in range(17)), 0.5, (0.2,) * 17)

    def took(tree: tuple[int, ...]) -> RealRound:
        levels = max(depths_of(tree))
        wide = sum(depth < levels for depth in depths_of(tree)) - (levels - 1)
        return RealRound(0.3 + 0.5 * levels + 0.07 * wide, 2 * table.target[len(tree)], 0.4)

    trees = probes(16, 4)
    assert trees[0] == chain(4) and full((8, 1)) in trees and full((8, 2)) not in trees
    seconds = fitted_seconds(table, {tree: took(tree) for tree in trees})
    for tree in [*trees, (-1, -1, 0, 0, 1, 3), full((3, 3))]:
        assert seconds(tree) == pytest.approx(took(tree).seconds)
    with pytest.raises(ValueError, match="measured up to 16 drafts, but this tree has 20 nodes"):
        seconds(full((4, 4)))


def test_no_part_of_drafting_costs_less_than_nothing() -> None:
    rounds = {chain(2): RealRound(0.4, 1, 1), chain(3): RealRound(0.3, 1, 1), full((2, 1)): RealRound(0.5, 1, 1)}
    seconds = fitted_seconds(Costs((1.0,) * 9, 0.1, (1.0,) * 9), rounds)
    assert seconds(chain(8)) >= seconds(chain(2)) > 2 and seconds((-1, -1, 0, 1)) > seconds(chain(2))


def plan_of(size: dict[str, Any] | None = None, draft: Any = None, **settings: Any) -> Plan:
    result = {
        "prompts": 2,
        "quick_prompts": 1,
        "prompt_tokens": 8,
        "new_tokens": 8,
        "parity_tokens": 16,
        "rows": 1,
        "minutes": 0.0,
        "interval": 0.1,
        "depths": [2],
        "draft_dtype": "auto",
        "draft_int8": False,
        "seed": 0,
        "trees": 4,
    } | (size or {})
    given = Prompts([[1, 2, 3], [4, 5]], [[6, 7], [8, 9, 3]], "own")
    parts = {"target": network(), "draft": draft or near(network(), 0.02), "sampling": Sampling(), "verify": "block"}
    return Plan(
        **parts | {"tokenizer": tokenizer(), "bench": Bench(**result), "names": ("t", "d"), "given": given} | settings
    )


def rounds(monkeypatch: pytest.MonkeyPatch, tree: float) -> list[list[Any]]:
    """Rounds with trees take `tree` seconds, with chains 1.25, others one; what is run in turn."""
    asked: list[list[Any]] = []

    def in_turn(engines: Any, *_: Any, **__: Any) -> Any:
        asked.append(list(engines))
        assert [engine.rule.name for engine, _ in engines.values()] == [
            key.rule if isinstance(key, PlannedTree) else "block" if key else "token" for key in engines
        ]
        seconds = {key: tree if isinstance(key, PlannedTree) else 1.25 if key else 1.0 for key in engines}
        return {key: RealRound(0.1, one - 0.2, 0.1) for key, one in seconds.items()}

    monkeypatch.setattr("cotrain.planning.planner.SHAPE", 1)
    monkeypatch.setattr(planner, "measure_rounds", in_turn)
    return asked


CHAINS = chains_of(2, (1.0, 1.1, 1.2), rates_of((1.3, 1.6), texts=32))


def tau_of(distributions: Any, tree: PlannedTree) -> float:
    return float(distributions.lengths.sum() / tree_calls(distributions, tree).sum())


def chosen_of(tree: TreeForecast, served: bool) -> Forecast:
    return replace(CHAINS, tree=tree, serves_tree=served)


def test_a_tree_is_measured_where_it_is_expected_to_be_faster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("inference.measure.costs.MOST", 1)
    rounds(monkeypatch, tree=0.5)
    plan = plan_of()
    report = measurement.measure(plan)
    extra, tree = report["extra"], served_tree(report["extra"])
    assert tree and 2 <= len(tree.parents) <= 4 and tree.parents != chain(len(tree.parents))
    assert report["settings"]["verify"] == tree.rule == extra["planned_rule"]
    assert report["settings"]["policy"] == f"Fixed(k={tree.depth})" and extra["planned_k"] in (1, 2)
    assert extra["planned_speedups"]["tree"] > extra["planned_speedups"]["chain"] and extra["parity"]["passed"]
    assert report["exactness"]["passed"] and report["exactness"]["figures"]["calls"]
    (line,) = [line for line in extra["said"] if line.startswith("a tree of ")]
    assert (
        f"{extra['planned_speedups']['tree']:.2f}x is expected with it, "
        f"{extra['planned_speedups']['chain']:.2f}x with a chain of"
        in line
        and line in capsys.readouterr().out
    )
    drafts = recorded(plan, extra)["rounds"][0][0]["drafts"]
    assert [draft["parent"] for draft in drafts] == list(tree.parents)


def test_the_chain_is_served_where_trees_are_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them ran in turn, with plain decoding."""
    asked, plan = rounds(monkeypatch, tree=9.0), plan_of(tree=TREE)
    result = best_tree(plan, CHAINS, plain_texts(plan))
    assert result.chain == pytest.approx(1.28) and result.speedup < 1
    assert asked[-1][:2] == [0, 2] and asked[-1][-1] == TREE and len(asked[-1]) == 5
    chosen, line = (
        chosen_of(result, False),
        f"draft length 2: {result.speedup:.2f}x is expected with trees, 1.28x with ",
    )
    assert result.gain < 0 and choice_line(chosen) == line + "the chain"
    extra = plan_entries(chosen, "block")
    assert extra["planned_shape"] is extra["planned_likeliest"] is None is served_tree(extra)
    assert extra["planned_rule"] == "block" and extra["planned_k"] == 2


def test_the_tree_of_the_folder_is_considered_though_no_other_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, plan = rounds(monkeypatch, tree=0.5), plan_of({"trees": 0}, tree=TREE)
    result = best_tree(plan, CHAINS, plain_texts(plan))
    assert result and asked == [[0, 2, TREE]] and result.speedup == pytest.approx(2 * result.tau)
    assert result.gain > 0 and served_tree(plan_entries(chosen_of(result, True), "block")) == TREE


@pytest.mark.parametrize("rule", ["coupled", "match"])
def test_rules_that_were_named_are_not_replaced(rule: str) -> None:
    assert best_tree(plan_of(tree=TREE, verify=rule), CHAINS, Emitted([], [], [], [])) is None


def test_a_kind_that_drafts_no_trees_is_planned_as_chains(capsys: pytest.CaptureFixture[str]) -> None:
    assert best_tree(plan_of(kind="retrieval"), CHAINS, Emitted([[1, 2]], [0], [[3, 4, 5]], [])) is None
    assert "bench: retrieval drafts are planned as chains" in capsys.readouterr().out


def test_the_shape_shows_though_a_first_round_drafts_nothing() -> None:
    """Heads have no state behind a prompt of one token."""
    target = tiny(vocab=300, hidden=64)
    heads = Medusa(MedusaNetwork(MedusaConfig(hidden_size=64, vocab_size=300, num_heads=2)), shape=(-1, -1, 0))
    engine = Engine(target, heads, verify="tree", policy=Fixed(2), rows=1)
    assert tree_of(engine, [1]) == tree_of(engine, [2, 3]) == (-1, -1, 0)


def test_at_temperature_0_a_planned_tree_is_rated_as_it_is_drafted() -> None:
    """With the likeliest children, whatever was planned; without a planned tree none is rated."""
    plan = plan_of({"trees": 0}, sampling=Sampling(temperature=0))
    assert best_tree(plan, CHAINS, Emitted([], [], [], [])) is None
    texts = plain_texts(plan)
    tree = PlannedTree((-1, -1, -1, 0, 0, 1), "tree")
    result = best_tree(replace(plan, tree=tree), CHAINS, texts)
    distributions = plain_distributions(plan, texts)
    assert result and distributions and result.tree == replace(tree, likeliest=True)
    assert result.tau == tau_of(distributions, result.tree)


def test_a_planned_tree_deeper_than_the_lengths_that_are_asked_for_is_rated() -> None:
    plan = plan_of(kind="medusa", draft=MedusaNetwork(MedusaConfig(hidden_size=64, vocab_size=300, num_heads=3)))
    shallow = replace(plan, bench=resized(plan.bench, depths=[1], trees=0), tree=PlannedTree((-1, -1, 0, 2), "tree"))
    result = best_tree(shallow, CHAINS, plain_texts(plan))
    assert result.tree.depth == 3 and result.tau > 1


def test_a_kind_without_a_distribution_of_texts_is_rated_by_rounds_that_are_forced() -> None:
    """Distributions by depth: at a text's first token those of the first depth alone, elsewhere all."""
    plan = plan_of(kind="medusa", draft=MedusaNetwork(MedusaConfig(hidden_size=64, vocab_size=300, num_heads=2)))
    distributions = plain_distributions(plan, plain_texts(plan))
    assert distributions.q.shape == (*distributions.x.shape, 2, 300)
    alone = distributions.q[:, 0].sum(-1)  # of a text's first token: no round begins before it
    assert bool((alone[:, 1] == 0).all()) and bool((distributions.q[:, 1:-2].sum(-1) > 0.99).all())
    result = candidate_trees(tree_search(plan, distributions), lambda parents: 1.0)
    assert max(tree.depth for tree in result) <= 2


def test_children_are_as_the_draft_was_trained() -> None:
    """Greedily drafting: the likeliest alone; else both sorts, each under the rules that differ for it."""
    plan, texts = plan_of(), plain_texts(plan_of())
    distributions = plain_distributions(plan, texts)
    assert distributions
    flat = candidate_trees(tree_search(plan, distributions), lambda parents: 1.0)
    assert {(tree.rule, tree.likeliest) for tree in flat} == {("tree", False), ("traversal", False), ("tree", True)}
    taus = [tau_of(distributions, tree) for tree in flat]
    assert taus == sorted(taus, reverse=True) and all(len(tree.parents) == 4 for tree in flat)
    assert all(
        tree.likeliest
        for tree in candidate_trees(tree_search(replace(plan, objective="greedy"), distributions), lambda parents: 1.0)
    )
    assert candidate_trees(tree_search(plan, distributions), lambda parents: 1.0 if parents == (-1, -1) else 99.0)[
        0
    ].parents == (-1, -1)
    cheap_chains = candidate_trees(
        tree_search(plan, distributions), lambda parents: 0.01 if parents == chain(len(parents)) else 1.0
    )
    assert all(len(set(tree.parents)) < len(tree.parents) for tree in cheap_chains)  # each branches


def test_few_texts_are_read_of_large_vocabularies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "ENTRIES", 2 * 300 * 8)
    plan = plan_of()
    distributions = plain_distributions(plan, plain_texts(plan))
    assert distributions.x.shape == (2, 8)


def test_advice_names_the_tree_that_was_measured() -> None:
    said = advice(chosen_of(TreeForecast(TREE, 2.0, 3.0, 0.8, 0.1, 0.0), True), Interval(0.9, 0.8, 0.95))
    assert (
        said
        and "0.90x with a tree of 5 nodes in 2 levels with sampled children, verify=traversal, 0.80x predicted" in said
    )
