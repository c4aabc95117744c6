"""Stand-ins for engines and clocks of a bench: what is timed is noted, and every figure tells what it is of."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cotrain.bench import measurement
from cotrain.config.settings import Bench
from cotrain.data.splits import Prompts
from cotrain.planning import plan as plans
from cotrain.planning import planner
from cotrain.planning.forecast import Acceptance, Forecast
from cotrain.planning.plan import Plan
from inference import Sampling
from inference.drafts.draft_folder import PlannedTree
from inference.measure.timing import Interval
from inference.output import Emitted
from studies import matrix, quantisation_table
from tests.tiny import tiny

RANKING, FINAL = [[i, 2] for i in range(5)], [[i, 3, 4, 5, 6, 7] for i in range(5)]
SPEEDS = {
    "speculative": 30.0,
    "speculative k=2": 26.0,
    "plain": 20.0,
    "transformers": 12.0,
    "ngram": 22.0,
    "transformers assisted": 9.0,
    "transformers matched": 8.0,
}
TAUS = {"speculative": 1.75, "speculative k=2": 1.5, "ngram": 1.25, "plain": 1.0}
REGIME = Sampling(0.7, top_k=9, top_p=0.8)
LIMIT: dict[str, int | None] = {"depths": None}  # of the draft
TREE = PlannedTree((-1, -1, 0), "traversal", True)


class Timed:
    """A timing whose every figure tells what was asked for."""

    def __init__(self, arms: Any, prompts: Any, rows: int, seed: int) -> None:
        self.arms = [arm.name for arm in arms]
        self.batches = [(prompts, [])]

    def speed(self, name: str, decode: bool = False) -> float:
        return SPEEDS[name] + 0.25 * decode

    def ratio(self, a: str, b: str, decode: bool = False) -> Interval:
        value = SPEEDS[a] / SPEEDS[b] + 0.125 * decode
        return Interval(value, value - 0.0625, value + 0.03125)

    def stats(self, name: str) -> Any:
        return SimpleNamespace(tau=TAUS[name]) if name in TAUS else None

    def texts(self, name: str) -> Any:
        return Emitted([[name]], [], [], [])  # type: ignore[list-item]


def engine(target: Any, proposer: Any = None, **settings: Any) -> Any:
    return SimpleNamespace(target=target, proposer=proposer, **settings)


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What is timed or decoded, in order."""
    found: list[dict[str, Any]] = []

    monkeypatch.setitem(LIMIT, "depths", None)

    def noted(arms: Any, prompts: Any, rows: int, seed: int = 0, **settings: Any) -> Any:
        found.append(
            {"arms": {arm.name: arm for arm in arms}, "prompts": prompts, "rows": rows, "seed": seed} | settings
        )
        return Timed(arms, prompts, rows, seed)

    def until_known(
        arms: Any, prompts: Any, rows: int, pair: Any, wanted: Any, seed: int, turned: Any, **_: Any
    ) -> Any:
        turned(1)
        return noted(arms, prompts, rows, seed, pair=pair, wanted=wanted), "reached"

    def engine_arm(name: str, engine: Any, sampling: Sampling, new: int) -> Any:
        return SimpleNamespace(name=name, engine=engine, sampling=sampling, new=new)

    def transformers_arm(name: str, model: Any, sampling: Sampling, new: int, **others: Any) -> Any:
        return SimpleNamespace(name=name, model=model, sampling=sampling, new=new, others=others)

    for module in (measurement, planner, quantisation_table, matrix):
        monkeypatch.setattr(module, "interleave", noted)
    monkeypatch.setattr(plans, "engine_arm", engine_arm)
    monkeypatch.setattr(measurement, "transformers_arm", transformers_arm)
    monkeypatch.setattr(matrix, "assisted_arm", transformers_arm)
    monkeypatch.setattr(measurement, "until_known", until_known)
    monkeypatch.setattr(measurement, "read_seconds", lambda _: 0.25)
    monkeypatch.setattr(plans, "Engine", engine)
    monkeypatch.setattr(measurement.adaptive, "reached_lines", lambda reached: [f"said {reached}"])
    monkeypatch.setattr(
        Plan,
        "student",
        lambda self, network: SimpleNamespace(
            proposer=lambda **settings: SimpleNamespace(
                network=network, depths=LIMIT["depths"], shortens=False, **settings
            )
        ),
    )
    return found


def rates_of(taus: Sequence[float], texts: int = 4, tokens: int = 8) -> Acceptance:
    """Texts of which a call at draft length k = 1, 2, ... gives so many tokens."""
    lengths = torch.full((texts,), float(tokens), dtype=torch.float64)
    return Acceptance(
        torch.stack([lengths / tau for tau in (1.0, *taus)]), lengths, torch.zeros(len(taus) + 1, 1, texts)
    )


def chains_of(k: int, speedups: Sequence[float], rates: Acceptance | None = None) -> Forecast:
    """The forecast of chains of which k drafts are chosen."""
    nothing = (0.0,) * len(speedups)
    return Forecast(rates or rates_of(speedups[1:]), nothing, k, k, tuple(speedups), nothing, 0.0)


def plan_of(**changed: Any) -> Plan:
    size = Bench(
        prompts=4,
        quick_prompts=2,
        prompt_tokens=8,
        new_tokens=6,
        parity_tokens=400,
        rows=3,
        minutes=0,
        interval=0.1,
        depths=[2, 4],
        draft_dtype="float64",
        draft_int8=False,
        seed=17,
        trees=0,
    )
    given = Prompts(RANKING, FINAL, "own")
    words: Any = "tokenizer"
    plan = Plan(tiny(), words, tiny(seed=1), REGIME, "block", size, ("t", "d"), given=given)
    return replace(plan, **changed)
