"""The forecasts of one draft: figures of texts of the target, costs of rounds here, and what follows from both."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cotrain.bench.forecast import Calls, Forecast, acceptance, alone, expected, forecast, mean_acceptance
from cotrain.bench.plan import Plan
from cotrain.bench.planner import BATCH, measured, plain_distributions, plain_texts, text_figures, tree_search
from cotrain.config.settings import PlanConfig
from cotrain.plan.costs_file import read_costs
from cotrain.plan.policy_file import RowRound, estimates, observed, policy_of, share
from cotrain.plan.tree_forecast import TreeForecast, tree_forecast
from inference.adaptive_policy import Adaptive
from inference.exactness.figures import Figures
from inference.measure.costs import Costs
from inference.output import Emitted
from inference.source import source_ids

SECONDS = 15.0  # after which real rounds of a number of rows are timed no further than they must
OBSERVED = 16  # texts in whose rounds the adaptive policy's estimates are fitted


@dataclass(frozen=True)
class Cell:
    """The forecasts at one temperature and number of rows. chains: of full batches. alone: speed-ups by draft length of
    batches that are decoded alone, see `forecast.alone`; empty if the texts fill no batch. tree: of the best tree, None
    if none was asked for or the kind drafts none."""

    chains: Forecast
    alone: Sequence[float]
    tree: TreeForecast | None

    @property
    def speedup(self) -> float:
        """Return the expected speed-up of what is recommended."""
        if self.tree and self.tree.recommended:
            return self.tree.speedup
        return self.chains.speedups[self.chains.k]


@dataclass(frozen=True)
class Drafted:
    """The forecasts of one draft. plan: the draft with its target. cells: by (temperature, rows). alpha: mean
    acceptance by temperature. profiles: acceptance by depth and temperature at the longest draft length, and that of
    each domain if there are several. costs: by number of rows. policy: the adaptive one."""

    path: str
    plan: Plan
    cells: Mapping[tuple[float, int], Cell]
    alpha: Mapping[float, float]
    profiles: Mapping[float, Mapping[str, Any]]
    costs: Mapping[int, Costs]
    policy: Adaptive


@dataclass(frozen=True)
class AtTemperature:
    """What the texts of one temperature say, whatever the number of rows. rounds: those of the longest chains, which
    were observed."""

    calls: Calls
    alpha: float
    profile: Mapping[str, Any]
    rounds: Sequence[RowRound]


def drafted(cfg: PlanConfig, plan: Plan, texts: dict[float, Emitted]) -> Drafted:
    """Forecast one draft. plan: the draft with its target. texts: those of the target by temperature; missing ones are
    sampled here, so that all drafts are forecast on the same ones."""
    rows, longest = sorted({1, *cfg.batches}), max(plan.depths)
    costs = (read_costs(cfg.costs, plan.names[1], rows, longest) if cfg.costs
             else {count: costs_at(plan, count) for count in rows})  # fmt: skip
    seconds = {rows: one.rounds for rows, one in costs.items()}
    by_temperature: dict[float, AtTemperature] = {}
    cells: dict[tuple[float, int], Cell] = {}
    for t in list(cfg.temperatures) or [plan.sampling.temperature]:
        here = replace(plan, sampling=replace(plan.sampling, temperature=t))
        if t not in texts:
            print(f"plan: {cfg.texts} texts of the target at temperature {t:g}")
            texts[t] = plain_texts(here, cfg.texts)
        by_temperature[t] = _at_temperature(here, texts[t])
        calls = by_temperature[t].calls
        chains = {rows: forecast(calls, costs[rows]) for rows in cfg.batches}
        trees = _trees(here, texts[t], chains)
        cells |= {(t, rows): Cell(one, alone(calls, seconds, rows), trees.get(rows)) for rows, one in chains.items()}
    mean = sum(share(one.rounds) for one in by_temperature.values()) / len(by_temperature)
    rounds = [each for one in by_temperature.values() for each in one.rounds]
    vocabulary = plan.target.get_output_embeddings().weight.shape[0]
    policy = policy_of(costs, estimates(mean, rounds), rounds, vocabulary, plan.target.device)
    return Drafted(
        plan.names[1], plan, cells, {t: one.alpha for t, one in by_temperature.items()},
        {t: one.profile for t, one in by_temperature.items()}, costs, policy,
    )  # fmt: skip


def costs_at(plan: Plan, rows: int) -> Costs:
    """Return the costs of rounds of this many rows."""
    print(f"plan: costs of rounds, {rows} row{'s' * (rows > 1)}")
    return measured(plan.batched(rows), time.perf_counter() + SECONDS).costs


def _at_temperature(plan: Plan, texts: Emitted) -> AtTemperature:
    longest = max(plan.depths)
    figures = text_figures(plan, texts, longest)
    engine, new = plan.engine(longest, BATCH), plan.bench.new_tokens
    prompts = texts.prompts[:OBSERVED]
    rounds = observed(engine, longest, prompts, plan.sampling, new, plan.bench.seed + 1)
    calls, profile = expected(figures, plan.verify, longest), acceptance(figures, plan.verify, longest)
    domains = by_domain(figures, calls, domains_of(plan.prompts.domains, texts.prompts), plan.verify)
    return AtTemperature(calls, mean_acceptance(figures), {**profile, "domains": domains}, rounds)


def domains_of(known: Mapping[tuple[int, ...], str], prompts: Sequence[list[int]]) -> list[str]:
    """Return the domain of each prompt, of an encoder-decoder by its source; empty if they are not known."""
    return [known[tuple(source_ids(prompt) or prompt)] for prompt in prompts] if known else []


def by_domain(figures: Figures, calls: Calls, domains: Sequence[str], verify: str) -> dict[str, Any]:
    """Return for each domain, if there are several: texts, mean acceptance, acceptance by depth, and tau by draft
    length 0 .. K. domains: of each text of `figures`."""
    parts = {one: [i for i, name in enumerate(domains) if name == one] for one in sorted({*domains})}
    if len(parts) < 2:
        return {}
    longest = len(calls.calls) - 1
    tau = {one: (calls.lengths[mine].sum() / calls.calls[:, mine].sum(1)).tolist() for one, mine in parts.items()}
    return {one: {"texts": len(mine), "alpha": mean_acceptance(figures.of(mine)), "tau": tau[one],
                  "conditional": acceptance(figures.of(mine), verify, longest)["conditional"]}
            for one, mine in parts.items()}  # fmt: skip


def _trees(plan: Plan, texts: Emitted, chains: Mapping[int, Forecast]) -> dict[int, TreeForecast]:
    """Return the forecast of the best tree by number of rows, where there is one."""
    distributions = plain_distributions(plan, texts) if plan.bench.trees else None
    if distributions is None:
        return {}
    print("plan: trees")
    search = tree_search(plan, distributions)
    forecasts = ((rows, tree_forecast(plan.batched(rows), one, distributions, search)) for rows, one in chains.items())
    return {rows: tree for rows, tree in forecasts if tree is not None}
