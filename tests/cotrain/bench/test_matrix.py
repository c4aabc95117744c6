"""The matrix of arms, and vLLM's side of it with an engine that only looks like vLLM."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cotrain.bench import matrix
from cotrain.bench.measurement import Plan, taus
from inference import Sampling
from inference.measure.floor import Machine
from inference.measure.timing import interleave
from inference.servers.vllm_server import Server, draft_model, vllm_arm
from tests.folders import network, tokenizer
from tests.kinds import medusa

LOOKALIKE = """
from types import SimpleNamespace as N
import sys
__version__ = "0.0"
class SamplingParams:
    def __init__(self, **settings):
        self.__dict__.update(settings)
class LLM:
    def __init__(self, target, **settings):
        self.rounds, self.settings = 0, settings
        print("starting", settings["speculative_config"])
        if target.endswith("broken"):
            sys.exit("no such model")
    def get_metrics(self):
        names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
        drafting = self.settings["speculative_config"] is not None
        return [N(name=n, value=self.rounds * w * drafting) for n, w in zip(names, (1, 2))] + [N(name="other")]
    def generate(self, prompts, params, use_tqdm):
        self.rounds += 5
        return [N(outputs=[N(token_ids=[len(a["prompt_token_ids"]), p.seed] * (p.max_tokens // 2))])
                for a, p in zip(prompts, params)]
"""
REPAIRED = "def expand_batch_to_tokens(*_): raise AssertionError\n"


@pytest.fixture
def lookalike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    sampler = tmp_path / "site" / "vllm" / "v1" / "sample"
    sampler.mkdir(parents=True)
    for folder, text in ((sampler.parents[1], LOOKALIKE), (sampler.parent, ""), (sampler, "")):
        (folder / "__init__.py").write_text(text)
    (sampler / "rejection_sampler.py").write_text(REPAIRED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setattr("inference.servers.vllm_server.SETTLE", 0.0)
    return tmp_path


def test_vllm_answers_prompt_by_prompt(lookalike: Path) -> None:
    with Server(sys.executable, "target", draft_model("draft", 4), 2, 64, lookalike / "log") as server:
        assert server.version == "0.0"
        arm = vllm_arm("vllm", server, Sampling(0.5), 6)
        timing = interleave([arm], [[1, 2, 3], [4, 5]], 2, seed=7, warmup=0)
    assert timing.texts("vllm").tokens == [[3, 7] * 3, [2, 8] * 3]
    stats = timing.stats("vllm")
    assert stats is not None and stats.tau == 3.0  # five rounds, two accepted drafts each
    assert "draft_model" in (lookalike / "log").read_text()  # its own lines went elsewhere


def test_without_drafts_vllm_emits_one_token_a_call(lookalike: Path) -> None:
    with Server(sys.executable, "target", None, 2, 64, lookalike / "log") as server:
        stats = interleave([vllm_arm("vllm", server, Sampling(), 4)], [[1]], 1, warmup=0).stats("vllm")
    assert stats is not None and stats.tau == 1.0


def test_a_vllm_that_does_not_start_says_why(lookalike: Path) -> None:
    with pytest.raises(RuntimeError, match="vllm ended: (.|\n)*no such model"):
        Server(sys.executable, "broken", None, 2, 64, lookalike / "log")


def test_settings_that_are_not_translated_are_refused(lookalike: Path) -> None:
    with pytest.raises(ValueError, match="Sampling.top_k"):
        vllm_arm("vllm", SimpleNamespace(), Sampling(top_k=5), 4)  # type: ignore[arg-type]


def plan_of(verify: str = "token", kind: str = "independent") -> Plan:
    target = network()
    draft: Any = medusa(target) if kind == "medusa" else network(layers=1, seed=0)
    for model in (target, draft)[: 1 if kind == "medusa" else 2]:
        model.generation_config.eos_token_id = None
    size = SimpleNamespace(
        prompts=2, quick_prompts=1, prompt_tokens=8, new_tokens=8, parity_tokens=10, rows=1, depths=[2, 3], minutes=0,
        interval=0.1,
        draft_dtype="bfloat16", draft_int8=True, compile=False, seed=0,
    )  # fmt: skip
    return Plan(target, tokenizer(), draft, Sampling(), verify, size, ("t", "d"), kind=kind)  # type: ignore[arg-type]


def test_the_length_is_planned_for_the_rule_that_verifies() -> None:
    token, block = (taus(plan_of(verify=rule)) for rule in ("token", "block"))
    assert token[1] == pytest.approx(block[1]) and all(token[k] < block[k] for k in (2, 3))


def test_every_cell_is_timed_beside_what_its_costs_allow(tmp_path: Path) -> None:
    plan = plan_of()
    said: list[str] = []
    cells = matrix.matrix(plan, matrix.Grid([0.0, 1.0], [1, 2], 2, None, tmp_path), said.append)
    assert [(cell["temperature"], cell["rows"]) for cell in cells] == [(0, 1), (1, 1), (0, 2), (1, 2)]
    assert plan.bench.rows == 1  # the plan that was given is left alone
    for cell in cells:
        assisted = {"transformers assisted", "transformers matched"}
        assert (assisted <= set(cell["arms"])) == (cell["rows"] == 1)
        costs = cell["costs"]
        assert cell["prompts"] >= 3 * cell["rows"] and costs["draft_dtype"] == "int8"
        arms = cell["arms"]
        assert arms["plain"]["over_plain"]["value"] == 1 and arms["plain"]["tau"] == 1
        chosen = arms["speculative"]
        plain, whole = (
            k * costs["draft"] + bool(k) * costs["first"] + costs["target"][k] + costs["rest"][k]
            for k in (0, chosen["k"])
        )
        assert chosen["allowed"] == pytest.approx(chosen["tau"] * plain / whole)
    assert any("of what costs allow" in text for text in said)


def test_heads_have_no_assistant_and_no_more_drafts_than_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference.measure.real_costs.MOST", 1)
    monkeypatch.setattr("cotrain.bench.planner.SHAPE", 1)
    machine = Machine(1e9, 1e9)
    plan, grid = plan_of(kind="medusa"), matrix.Grid([1.0], [1], 4, None, tmp_path)
    plan.bench.depths = [2, 3, 8]  # of three heads
    cell = matrix._cell(plan, grid, {}, machine)
    assert set(cell["arms"]) == {"speculative", "speculative k=3", "plain", "ngram", "transformers"}
    assert cell["arms"]["speculative k=3"]["of_allowed"] > 0 and len(cell["costs"]["target"]) == 4
    (plain, whole) = (cell["floor"][f"{name}_bytes"] for name in ("plain", "round"))
    assert 0 < whole - plain < 0.1 * plain  # the target's pass over more ids, and nothing of the heads
