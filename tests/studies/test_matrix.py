"""The matrix of arms over temperatures and batch sizes: with real engines, and each figure from the part it is of."""

import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cotrain.bench import measurement
from cotrain.planning import plan as plans
from cotrain.planning.plan import CompiledParts, Plan
from cotrain.planning.planner import MeasuredCosts, measure_acceptance
from inference import Sampling
from inference.measure.costs import Costs
from inference.proposers import NGram
from studies import matrix
from studies.floor import Machine
from studies.matrix import Grid, Matrix
from tests.bench_stubs import LIMIT, REGIME, SPEEDS, TAUS, Timed, met, plan_of, rates_of  # noqa: F401
from tests.cotrain.bench.test_reports import ALONE, REAL
from tests.folders import network, tokenizer
from tests.kinds import medusa
from tests.settings import resized


def real_plan(verify: str = "token", kind: str = "independent") -> Plan:
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
    token, block = (measure_acceptance(real_plan(verify=rule)) for rule in ("token", "block"))
    assert token.tau(1) == pytest.approx(block.tau(1)) and all(token.tau(k) < block.tau(k) for k in (2, 3))


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
    monkeypatch.setattr("inference.measure.costs.MOST", 1)
    monkeypatch.setattr("cotrain.planning.planner.SHAPE", 1)
    machine = Machine(1e9, 1e9)
    plan, grid = real_plan(kind="medusa"), matrix.Grid([1.0], [1], 4, None, tmp_path)
    plan.bench.depths = [2, 3, 8]  # of three heads
    cell = matrix._cell(plan, grid, {}, machine)
    assert set(cell["arms"]) == {"speculative", "speculative k=3", "plain", "ngram", "transformers"}
    assert cell["arms"]["speculative k=3"]["of_allowed"] > 0 and len(cell["costs"]["target"]) == 4
    (plain, whole) = (cell["floor"][f"{name}_bytes"] for name in ("plain", "round"))
    assert 0 < whole - plain < 0.1 * plain  # the target's pass over more ids, and nothing of the heads


# --- its parts


def stubbed(monkeypatch: pytest.MonkeyPatch, costs: Costs, machine: Machine) -> tuple[list[Any], list[Any], Any]:
    """Parts of a matrix that tell what they were asked: loads of rounds, plans that taus are of; the draft's model."""
    asked, sent, lm = list[Any](), list[Any](), SimpleNamespace(model="assistant")

    def loads(target: Any, draft: Any, drafted: int, *shape: int) -> list[Any]:
        asked.append((target, draft, drafted, *shape))
        return [SimpleNamespace(seconds=lambda machine, s=s + drafted: s, bytes=100 + drafted) for s in (0.25, 0.5)]

    def choose_compiled(plan: Any) -> Any:
        return replace(plan, compiled=CompiledParts(True, False, True)), MeasuredCosts(costs, ALONE, {})

    def rates(plan: Any) -> Any:
        sent.append(plan)
        return rates_of((1.0, 1.5, 9.0, 3.0)[: max(plan.depths)])

    monkeypatch.setattr(matrix, "choose_compiled", choose_compiled)
    monkeypatch.setattr(matrix, "measure_acceptance", rates)
    monkeypatch.setattr(matrix, "round_loads", loads)
    monkeypatch.setattr(matrix, "measure_machine", lambda device, dtype: machine)
    monkeypatch.setattr(matrix, "peak_memory", lambda: 3 * 2**20)
    monkeypatch.setattr(matrix, "line", lambda cell: "")
    made = measurement.Plan.proposer

    def proposer(self: Any, counted: bool = False) -> Any:
        result = made(self, counted)
        result.language_model = lambda *_: lm
        return result

    monkeypatch.setattr(measurement.Plan, "proposer", proposer)
    monkeypatch.setattr(plans, "Engine", lambda target, *given, **settings: SimpleNamespace(
        target=SimpleNamespace(vocabulary=32, of=target), given=given, **settings))  # fmt: skip
    monkeypatch.setitem(SPEEDS, "transformers compiled", 10.0)
    return asked, sent, lm


@pytest.mark.parametrize(("rows", "limit", "k"), [(1, None, 3), (4, 3, 1)])
def test_a_cell_of_a_matrix(
    met: list[Any],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    rows: int,
    limit: int | None,
    k: int,
) -> None:
    monkeypatch.setitem(LIMIT, "depths", limit)
    costs, machine = replace(REAL, rows=rows), Machine(2.0, 3.0)
    asked, sent, lm = stubbed(monkeypatch, costs, machine)
    plan = plan_of(bench=resized(plan_of().bench, compile=True))
    (cell,) = matrix.matrix(plan, Grid([0.5], [rows], 2, None, tmp_path), lambda _: None)
    (round,) = met
    at = replace(REGIME, temperature=0.5)
    alone = {"transformers assisted", "transformers matched", "transformers compiled"} if rows == 1 else set[str]()
    assert set(round["arms"]) == {"speculative", "speculative k=2", "plain", "ngram", "transformers"} | alone
    queue = 1 if rows == 1 else 6 * rows
    assert (round["rows"], round["seed"], round["prompts"]) == (queue, 17, plan.final(0, max(4, 3 * queue)))
    assert {(arm.sampling, arm.new) for arm in round["arms"].values()} == {(at, 6)}
    arms = round["arms"]
    own = {"speculative": (k, "block"), "speculative k=2": (2, "token"), "ngram": (2, "block")}
    assert {name: (arms[name].engine.policy.k, arms[name].engine.verify) for name in own} == own
    assert {arms[name].engine.rows for name in (*own, "plain")} == {rows}
    assert isinstance(arms["ngram"].engine.given[0], NGram) and arms["transformers"].others == {"rows": rows}
    if rows == 1:
        assert arms["transformers compiled"].others == {"rows": 1, "compile": True}
        assert arms["transformers assisted"].others == {"assistant": "assistant"}
        assert arms["transformers matched"].others == {"assistant": "assistant", "k": 2}
    assert sent[0].sampling == at and sent[0].compiled == CompiledParts(True, False, True)
    assert (cell["temperature"], cell["rows"], cell["speculative"]) == (0.5, rows, "speculative")
    assert cell["costs"] == asdict(costs) and cell["compiled"] == CompiledParts(True, False, True)._asdict()
    for name, arm in cell["arms"].items():
        drafted = {"speculative": k, "speculative k=2": 2}.get(name)
        assert arm == arm_of(name) | (allowed_of(name, drafted, costs) if drafted else {})
    assert cell["floor"] == {
        "machine": asdict(machine), "peak_memory_mib": 3.0, "plain_share": 0.75 / costs.round(0), "plain_bytes": 200,
        "round_share": (0.75 + 2 * k) / costs.round(k), "round_bytes": 200 + 2 * k,
    }  # fmt: skip
    assert [one[1:] for one in asked] == [(lm, 0, rows, 40), (lm, k, rows, 40)]


def arm_of(name: str) -> dict[str, Any]:
    timing = Timed([], [], 0, 0)
    return {"speed": SPEEDS[name], "tau": TAUS.get(name), "over_plain": timing.ratio(name, "plain")._asdict(),
            "under_speculative": timing.ratio("speculative", name)._asdict()}  # fmt: skip


def allowed_of(name: str, k: int, costs: Costs) -> dict[str, Any]:
    allowed = TAUS[name] * costs.round(0) / costs.round(k)
    decoding = Timed([], [], 0, 0).ratio(name, "plain", decode=True).value
    return {"k": k, "allowed": allowed, "of_allowed": decoding / allowed}


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
    "twice": ({"targets": ["int8"]}, {}, "quantised", "quantisation: quantised drafts with the target in fewer"),
}


@pytest.mark.parametrize(("asked", "regime", "kind", "said"), REFUSED.values(), ids=REFUSED)
def test_a_matrix_that_cannot_be_is_refused(asked: Any, regime: Any, kind: str, said: str) -> None:
    target = network()
    draft: Any = medusa(target) if kind == "medusa" else network(layers=1)
    cfg: Any = SimpleNamespace(
        regime=SimpleNamespace(**{"top_k": 0, "top_p": 1.0} | regime), draft=SimpleNamespace(path="a draft"),
        target=SimpleNamespace(path="a target", adapter=None),
    )  # fmt: skip
    settings = Matrix(**({"temperatures": [1.0]} if asked else {}) | asked)
    with pytest.raises(ValueError, match=f"^{said}"):
        matrix.refuse(settings, cfg, kind, matrix.Pair(target, tokenizer(), draft))  # type: ignore[arg-type]
