"""The matrix of arms over temperatures and batch sizes: with real engines, and each figure from the part it is of."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cotrain.planning.plan import Plan
from inference import Sampling
from inference.models.pretrained import emulated
from studies import matrix
from studies.floor import Machine
from studies.matrix import Matrix
from tests.bench_stubs import Timed
from tests.cotrain.bench.test_reports import REAL
from tests.folders import network, tokenizer
from tests.kinds import medusa


def real_plan(verify: str = "token", kind: str = "independent") -> Plan:
    target = network()
    draft: Any = medusa(target) if kind == "medusa" else network(layers=1, seed=0)
    for model in (target, draft)[: 1 if kind == "medusa" else 2]:
        model.generation_config.eos_token_id = None
    size = SimpleNamespace(
        prompts=2,
        quick_prompts=1,
        prompt_tokens=8,
        new_tokens=8,
        parity_tokens=10,
        rows=1,
        depths=[2, 3],
        minutes=0,
        interval=0.1,
        draft_dtype="bfloat16",
        draft_int8=False,
        seed=0,
    )
    return Plan(target, tokenizer(), draft, Sampling(), verify, size, ("t", "d"), kind=kind)  # type: ignore[arg-type]


def test_every_cell_is_timed_beside_what_its_costs_allow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference.measure.costs.MOST", 1)
    monkeypatch.setattr("cotrain.planning.planner.SHAPE", 1)
    monkeypatch.setattr(matrix, "measure_machine", lambda *_: Machine(1e9, 1e9))
    monkeypatch.setattr(matrix, "QUEUE", 1)
    plan = real_plan()
    said: list[str] = []
    cells = matrix.matrix(plan, matrix.Grid([0.0, 1.0], [1, 2], 2, None, tmp_path), said.append)
    assert [(cell["temperature"], cell["rows"]) for cell in cells] == [(0, 1), (1, 1), (0, 2), (1, 2)]
    assert plan.bench.rows == 1  # the plan that was given is left alone
    dtype = "float32" if emulated(torch.bfloat16) else "bfloat16"
    for cell in cells:
        assisted = {"transformers assisted", "transformers matched"}
        assert (assisted <= set(cell["arms"])) == (cell["rows"] == 1)
        costs = cell["costs"]
        assert cell["prompts"] >= 3 * cell["rows"] and costs["draft_dtype"] == dtype
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
    monkeypatch.setattr("inference.measure.costs.MOST", 1)
    monkeypatch.setattr("cotrain.planning.planner.SHAPE", 1)
    plan, grid = real_plan(kind="medusa"), matrix.Grid([1.0], [1], 4, None, tmp_path)
    plan.bench.depths = [2, 3, 8]  # of three heads
    cell = matrix._cell(plan, grid, {}, Machine(1e9, 1e9))
    assert set(cell["arms"]) == {"speculative", "speculative k=3", "plain", "ngram", "transformers"}
    assert cell["arms"]["speculative k=3"]["of_allowed"] > 0 and len(cell["costs"]["target"]) == 4
    (plain, whole) = (cell["floor"][f"{name}_bytes"] for name in ("plain", "round"))
    assert 0 < whole - plain < 0.1 * plain  # the target's pass over more ids, and nothing of the heads


# --- its parts


def test_the_faster_of_the_drafting_arms_is_what_others_are_compared_with() -> None:
    class Slow(Timed):
        def speed(self, name: str, decode: bool = False) -> float:
            return 1.0 if name == "speculative" else super().speed(name, decode)

    timing: Any = Slow([SimpleNamespace(name=name) for name in ("speculative", "speculative k=2", "plain")], [], 1, 0)
    result = matrix._entry(timing, REAL, {"speculative": 3, "speculative k=2": 2, "plain": 0}, Sampling(0.5))
    assert result["speculative"] == "speculative k=2"
    assert result["arms"]["plain"]["under_speculative"] == timing.ratio("speculative k=2", "plain")._asdict()


REFUSED = {
    "nothing": ({}, {}, "independent", "name matrix.temperatures=, or matrix.targets="),
    "kind": ({"vllm": sys.executable}, {}, "medusa", "matrix.vllm: vLLM is measured with independent drafts only"),
    "cut": ({"vllm": sys.executable}, {"top_p": 0.9}, "independent", "matrix.vllm: vLLM is measured without top-k and"),
    "interpreter": ({"vllm": "/no/python"}, {}, "independent", "matrix.vllm=/no/python is not a Python interpreter"),
    "drafts": ({"drafts": ["int3"]}, {}, "independent", "matrix.drafts: 'int3' is not one of none, int8, nf4"),
    "rounded": ({"targets": ["none"], "drafts": ["int8"]}, {}, "medusa", "matrix.drafts: MedusaNetwork has 2 matrices"),
    "targets": ({"targets": ["int3"]}, {}, "independent", "matrix.targets: quantisation must be one of"),
    "twice": ({"targets": ["int8"]}, {}, "quantised", "quantisation: draft=quantised rounds the target itself"),
}


@pytest.mark.parametrize(("asked", "regime", "kind", "said"), REFUSED.values(), ids=REFUSED)
def test_a_matrix_that_cannot_be_is_refused(asked: Any, regime: Any, kind: str, said: str) -> None:
    target = network()
    draft: Any = medusa(target) if kind == "medusa" else network(layers=1)
    cfg: Any = SimpleNamespace(
        regime=SimpleNamespace(**{"top_k": 0, "top_p": 1.0} | regime),
        draft=SimpleNamespace(path="a draft"),
        target=SimpleNamespace(path="a target", adapter=None),
    )
    settings = Matrix(**({"temperatures": [1.0]} if asked else {}) | asked)
    with pytest.raises(ValueError, match=f"^{said}"):
        matrix.refuse(settings, cfg, kind, matrix.Pair(target, tokenizer(), draft))  # type: ignore[arg-type]
