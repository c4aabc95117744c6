"""`cotrain bench` measures the draft length, the tree and the rule that a folder was planned with, as it is served."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cotrain.commands.bench import _plan_line, _planned
from cotrain.commands.served_pair import prompts
from cotrain.config.groups import DEPTHS
from cotrain.planning import planner
from cotrain.planning.forecast import TreeForecast
from cotrain.planning.planner import MeasuredCosts, plan_length
from inference.drafts.draft_folder import Metadata, PlannedTree, ServedAs
from inference.measure.costs import Costs, RealRound
from tests.bench_stubs import chains_of, plan_of, rates_of
from tests.folders import network, tokenizer, write_rows
from tests.settings import composed
from tests.tiny import TARGET

TREE = PlannedTree((-1, -1, 0), "traversal")


def made(k: int = 5, tree: PlannedTree | None = None, verify: str = "block") -> Metadata:
    return Metadata(TARGET, k, tree=tree, served=ServedAs(verify))


def planned(metadata: Metadata | None, *settings: str) -> tuple[int | None, list[int]]:
    cfg: Any = composed("draft.path=there", *settings, command="bench")
    typed, cfg.verify = cfg.verify, cfg.verify or "block"  # as `as_trained` fills it in
    return _planned(cfg, metadata, typed), list(cfg.bench.depths)


class TestPromptLengths:
    def measured_on(self, tmp_path: Path, room: int | None, stored: int = 48) -> tuple[int, int]:
        """The limit of the prompt length, and the number of prompts, of conversations longer than 48 tokens."""
        rows = [{"prompt": f"Number {i} " + "of many words " * (4 + i % 3 * 8)} for i in range(90)]
        file = write_rows(tmp_path / "chats.jsonl", rows)
        cfg: Any = composed("draft.path=there", f"data.path={file}", command="bench")
        cfg.bench.prompt_tokens, cfg.data.chat = stored, False
        given = prompts(cfg.data, cfg.bench, network(), tokenizer(), room)
        return cfg.bench.prompt_tokens, len(given.ranking) + len(given.final)

    def test_prompts_that_are_longer_than_the_folder_says_are_measured(self, tmp_path: Path) -> None:
        limit, count = self.measured_on(tmp_path, 1000, stored=8)
        assert limit > 48 and count >= 8

    def test_a_length_that_suffices_stays(self, tmp_path: Path) -> None:
        limit, _ = self.measured_on(tmp_path, 1000)
        assert self.measured_on(tmp_path, 1000, limit)[0] == limit == self.measured_on(tmp_path, 1000, limit)[0]

    def test_a_length_that_was_typed_stands(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="no prompt of at most 8 tokens"):
            self.measured_on(tmp_path, None, stored=8)


class TestPlan:
    def test_a_folder_is_measured_as_it_was_planned(self) -> None:
        assert planned(made(5)) == (5, DEPTHS)
        assert "measures draft length 5 with verify=block, as the folder says" in _plan_line(made(5))
        assert planned(made(12)) == (12, [*DEPTHS, 12])  # so that its texts fit into the context
        assert planned(made(2, TREE))[0] == 2
        assert "a tree of 3 nodes with verify=traversal" in _plan_line(made(2, TREE))

    @pytest.mark.parametrize("settings", ["bench.depths=[3,6]", "bench.trees=8", "verify=token"])
    def test_what_is_typed_is_chosen_anew(self, settings: str) -> None:
        for metadata in (made(5), made(2, TREE)):
            wanted = [3, 6] if "depths" in settings else DEPTHS
            assert planned(metadata, settings) == (None, wanted)

    def test_the_rule_of_the_plan_may_be_typed(self) -> None:
        assert planned(made(5), "verify=block")[0] == 5
        assert planned(made(2, TREE), "verify=traversal")[0] == 2
        assert planned(made(2, TREE), "verify=block")[0] is None  # chains

    def test_a_folder_without_a_plan_is_planned(self) -> None:
        assert planned(None) == (None, DEPTHS)

    def test_a_planned_length_is_compared_with_plain_decoding_alone(self) -> None:
        costs = Costs((1.0,) * 6, 0.9, (0.0,) * 6)  # dear drafts: one is the fastest number of them
        rounds = {k: RealRound(0.9 * k, 1.0, 0.0) for k in (0, 1, 5)}
        rates, timed = rates_of((1.9, 2.0, 2.05, 2.1, 2.12)), MeasuredCosts(costs, costs, rounds)
        for length, k in ((None, 1), (5, 5)):
            plan: Any = SimpleNamespace(depths=[5], planned=length, bench=SimpleNamespace(rows=1))
            assert plan_length(plan, timed, rates)[0].k == k

    def test_a_planned_tree_is_measured_though_the_chain_looks_faster(self, monkeypatch: pytest.MonkeyPatch) -> None:
        slow = TreeForecast(TREE, 2.0, 1.0, 1.1, -0.2, 0.0)
        chains = chains_of(2, (1.0, 1.1, 1.3))
        monkeypatch.setattr(planner, "measure_acceptance", lambda *_: chains.acceptance)
        monkeypatch.setattr(planner, "plan_length", lambda *_: (chains, "costs"))
        monkeypatch.setattr(planner, "best_tree", lambda *_: slow)
        for length, served in ((None, None), (2, slow)):
            plan = plan_of(bench=plan_of().bench.model_copy(update={"rows": 1}), tree=TREE, planned=length)
            drafting, _, chosen = planner.plan_draft(plan, "costs", "texts")  # type: ignore[arg-type]
            assert chosen.served is served and drafting.tree == (served.tree if served else None)
