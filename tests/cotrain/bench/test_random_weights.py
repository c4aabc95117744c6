"""Networks of random weights measured, by hand, and the report that is written of them."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cotrain.bench import random_weights
from cotrain.commands import bench
from cotrain.config.settings import Bench
from inference import Sampling
from inference.measure import floor
from inference.measure.costs import Costs
from inference.measure.timing import Interval
from tests.bench_stubs import Timed


def test_shapes_alone_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    costs, made = Costs((1.0, 1.1, 1.2, 1.3), 0.1, (0.2, 0.2, 0.2, 0.2), 2, 12, first=0.05), list[Any]()
    target: Any = SimpleNamespace(device="cpu", dtype=torch.float32)
    config = SimpleNamespace(vocab_size=11)
    config.get_text_config = lambda: config
    target.config = config

    def noted(arms: Any, prompts: Any, rows: int, seed: int) -> Any:
        made.append((arms, prompts, rows, seed))
        return Timed(arms, prompts, rows, seed)

    asked: dict[str, Any] = {}
    monkeypatch.setattr(random_weights, "interleave", noted)
    monkeypatch.setattr(random_weights, "engine_arm", lambda name, engine, sampling, new: SimpleNamespace(
        name=name, engine=engine, sampling=sampling, new=new))  # fmt: skip
    monkeypatch.setattr(random_weights, "Engine", lambda target, **settings: SimpleNamespace(target=target, **settings))
    monkeypatch.setattr(random_weights, "Synthetic", lambda target, **settings: SimpleNamespace(**settings))
    monkeypatch.setattr(random_weights, "LM", lambda model, rows: (model, rows))
    monkeypatch.setattr(random_weights, "measure_machine", lambda *_: floor.Machine(2.0, 3.0))

    def loads(target: Any, draft: Any, k: int, rows: int, context: int) -> list[Any]:
        asked[str(k)] = target, draft, rows, context
        return [SimpleNamespace(seconds=lambda machine: 0.25 + k)]

    monkeypatch.setattr(random_weights, "round_loads", loads)
    monkeypatch.setattr(random_weights, "student_class", lambda kind: lambda draft, target: SimpleNamespace(
        proposer=lambda compile: ("proposer", compile)))  # fmt: skip
    monkeypatch.setattr(random_weights, "measure_costs", lambda *given, **s: asked.update(costs=(given, s)) or costs)
    size = Bench(4, 3, 8, 9, 50, 9, 0, 0.1, [2, 3], "auto", False, True, 5, 0)
    (cell,) = random_weights.measure(target, "draft", 0.8, Sampling(0.7), size, [2], lambda _: None)  # type: ignore[arg-type]
    tau = [1.0, 1.8, 2.44, 2.952]
    speedups = [1.2 * tau[k] / (costs.round(k)) for k in range(4)]
    k = max(range(4), key=speedups.__getitem__)
    assert k == 3 and cell["k"] == 3 and cell["predicted"] == pytest.approx(speedups[3])
    assert asked["costs"] == ((target, ("proposer", True), 3), {"context": 12, "sampling": Sampling(0.7)})
    assert asked["0"] == asked["3"] == ((target, 2), ("draft", 2), 2, 12)
    ((arms, prompts, rows, seed),) = made
    fast, slow = arms
    assert (fast.engine.alpha, fast.engine.policy.k, fast.engine.rows, fast.engine.compile) == (0.8, 3, 2, True)
    assert (slow.engine.rows, slow.engine.compile, rows, seed, len(prompts)) == (2, True, 2, 5, 6)
    assert {len(prompt) for prompt in prompts} == {8} and {(arm.sampling, arm.new) for arm in arms} == {
        (Sampling(0.7), 9)
    }
    timing = Timed(arms, prompts, 2, 5)
    assert cell["measured"] == timing.ratio("speculative", "plain", decode=True)._asdict()
    assert cell["tokens_per_second"] == {"speculative": 30.0, "plain": 20.0} and cell["tau"] == 1.75
    assert (cell["plain_share"], cell["round_share"]) == (0.25 / costs.round(0), 3.25 / costs.round(3))
    assert (cell["plain_seconds"], cell["round_seconds"]) == (costs.round(0), costs.round(3))
    assert cell["machine"] == asdict(floor.Machine(2.0, 3.0))
    assert (cell["rows"], cell["alpha"]) == (2, 0.8)


def test_a_report_with_nan_is_written_as_valid_json(tmp_path: Path) -> None:
    cell = {"speedup": Interval(1.5, math.nan, math.nan)._asdict(), "rows": [1, math.inf]}
    bench._write(tmp_path, {"extra": {"bits": [cell]}})

    def refused(name: str) -> Any:
        raise AssertionError(name)

    found = json.loads((tmp_path / "report.json").read_text(), parse_constant=refused)
    assert found == {"extra": {"bits": [{"speedup": {"value": 1.5, "low": None, "high": None}, "rows": [1, None]}]}}
