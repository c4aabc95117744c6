"""The forecasts for one draft: its acceptance on the target's texts, the costs of its rounds on this machine, and the
speed that follows from both."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cotrain.config.settings import PlanConfig
from cotrain.planning.costs_file import read_costs
from cotrain.planning.forecast import Acceptance, Forecast, TreeForecast, acceptance, alone, forecast
from cotrain.planning.plan import Plan
from cotrain.planning.planner import (
    BATCH,
    CANDIDATES,
    candidate_trees,
    fastest_tree,
    measured_costs,
    plain_distributions,
    plain_texts,
    text_figures,
    tree_search,
    tree_seconds,
)
from cotrain.planning.policy_file import RowRound, estimates, observed, policy_of, share
from inference.adaptive_policy import Adaptive
from inference.exactness.figures import Figures
from inference.measure.costs import Costs
from inference.output import Emitted
from inference.source import source_ids

SECONDS = 15.0  # after which real rounds of a number of rows are timed no further than they must
OBSERVED = 16  # texts in whose rounds the adaptive policy's estimates are fitted


@dataclass(frozen=True)
class Drafted:
    """The forecasts for one draft.

    path: the draft's folder. plan: the draft with its target.
    cells: forecasts, keyed by (temperature, rows).
    acceptance: keyed by temperature; its dictionary `by_depth` has the entry `domains`, the acceptance in each domain
    ({} for one domain).
    costs: costs of rounds, keyed by number of rows. policy: the adaptive policy.
    """

    path: str
    plan: Plan
    cells: Mapping[tuple[float, int], Forecast]
    acceptance: Mapping[float, Acceptance]
    costs: Mapping[int, Costs]
    policy: Adaptive


def drafted(cfg: PlanConfig, plan: Plan, texts: dict[float, Emitted]) -> Drafted:
    """Return the forecasts for one draft.

    plan: the draft with its target. texts: the target's texts, keyed by temperature. Missing texts are sampled and
    added to `texts`, in place, so that all drafts are forecast on the same ones.
    """
    rows, longest = sorted({1, *cfg.batches}), max(plan.depths)
    costs = (
        read_costs(cfg.costs, plan.names[1], rows, longest)
        if cfg.costs
        else {count: costs_at(plan, count) for count in rows}
    )
    seconds = {rows: one.rounds for rows, one in costs.items()}
    rates: dict[float, Acceptance] = {}
    rounds: list[list[RowRound]] = []
    cells: dict[tuple[float, int], Forecast] = {}
    for t in cfg.temperatures or [plan.sampling.temperature]:
        here = replace(plan, sampling=replace(plan.sampling, temperature=t))
        if t not in texts:
            print(f"plan: {cfg.texts} texts of the target at temperature {t:g}")
            texts[t] = plain_texts(here, cfg.texts)
        rates[t] = _rates(here, texts[t])
        engine, prompts, new = here.engine(longest, BATCH), texts[t].prompts[:OBSERVED], plan.bench.new_tokens
        rounds.append(observed(engine, longest, prompts, here.sampling, new, plan.bench.seed + 1))
        chains = {count: forecast(rates[t], costs[count]) for count in cfg.batches}
        trees = _trees(here, texts[t], chains)
        for count, one in chains.items():
            tree, lone = trees.get(count), alone(rates[t], seconds, count)
            served = tree is not None and tree.recommended
            cells[t, count] = replace(one, alone=lone, tree=tree, serves_tree=served)
    mean, every = sum(map(share, rounds)) / len(rounds), [one for some in rounds for one in some]
    vocabulary = plan.target.get_output_embeddings().weight.shape[0]
    policy = policy_of(costs, estimates(mean, every), every, vocabulary, plan.target.device)
    return Drafted(plan.names[1], plan, cells, rates, costs, policy)


def costs_at(plan: Plan, rows: int) -> Costs:
    """Return the costs of rounds with `rows` rows, timed on this machine."""
    print(f"plan: costs of rounds, {rows} row{'s' * (rows > 1)}")
    return measured_costs(plan.batched(rows), time.perf_counter() + SECONDS).costs


def _rates(plan: Plan, texts: Emitted) -> Acceptance:
    longest = max(plan.depths)
    figures = text_figures(plan, texts, longest)
    rates = acceptance(figures, plan.verify, longest)
    domains = by_domain(figures, rates, domains_of(plan.prompts.domains, texts.prompts), plan.verify)
    return replace(rates, by_depth={**rates.by_depth, "domains": domains})


def domains_of(known: Mapping[tuple[int, ...], str], prompts: Sequence[list[int]]) -> list[str]:
    """Return the domain of each prompt; [] if `known` is empty. known: domain, keyed by the prompt's token ids. For an
    encoder-decoder these are the ids of the encoder input."""
    return [known[tuple(source_ids(prompt) or prompt)] for prompt in prompts] if known else []


def by_domain(figures: Figures, rates: Acceptance, domains: Sequence[str], verify: str) -> dict[str, Any]:
    """Return, keyed by domain, the number of texts, mean acceptance, conditional acceptance by depth, and tau at draft
    lengths 0 .. K. Return {} if there is only one domain.

    figures: the probabilities of both models on all texts. rates: the acceptance on all texts. domains: the domain of
    each text. verify: the verification rule.
    """
    parts = {one: [i for i, name in enumerate(domains) if name == one] for one in sorted({*domains})}
    if len(parts) < 2:
        return {}
    entries: dict[str, Any] = {}
    for one, mine in parts.items():
        own = acceptance(figures.of(mine), verify, len(rates.calls) - 1)
        tau = (rates.lengths[mine].sum() / rates.calls[:, mine].sum(1)).tolist()
        entries[one] = {"texts": len(mine), "alpha": own.alpha, "tau": tau, "conditional": own.by_depth["conditional"]}
    return entries


def _trees(plan: Plan, texts: Emitted, chains: Mapping[int, Forecast]) -> dict[int, TreeForecast]:
    """Return the forecast of the best tree, keyed by number of rows. A number of rows without a tree has no entry.
    texts: the target's texts. chains: forecasts of chains on these texts, keyed by number of rows."""
    distributions = plain_distributions(plan, texts) if plan.bench.trees else None
    if distributions is None:
        return {}
    print("plan: trees")
    search, best = tree_search(plan, distributions), dict[int, TreeForecast]()
    for rows, one in chains.items():
        here = plan.batched(rows)
        trees = candidate_trees(search, tree_seconds(here))[:CANDIDATES]
        if tree := fastest_tree(here, one, distributions, trees):
            best[rows] = tree
    return best
