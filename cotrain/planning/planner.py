"""Choices from measured costs and expected acceptance: the draft length, and chain or tree.

Trees are rated by their expected target calls (`inference.measure.tree_plan`) and by a model of costs, which is fitted
to the rounds of a few trees. The best trees are then run, and compared with the best chain by the time of their rounds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isnan
from typing import Any, TypeVar

from torch import Tensor

from cotrain.planning.forecast import Acceptance, Forecast, TreeForecast, acceptance, alone, error_of_sum, forecast
from cotrain.planning.plan import Plan
from cotrain.rollout.training_texts import start_of
from inference import Engine
from inference.drafts.draft_folder import PlannedTree
from inference.exactness.figures import Figures
from inference.exactness.side_by_side import pair_figures
from inference.measure.costs import Costs, RealRound, calibrated, measure_costs, measure_rounds, spans_of
from inference.measure.timing import Interval, interleave
from inference.measure.tree_plan import Distributions, Search, distributions_of, distributions_of_rounds, reach_under
from inference.measure.tree_shapes import Seconds, fitted_seconds, probes
from inference.models.lm import LM
from inference.output import Emitted
from inference.proposers import kind_of
from inference.verify import predict_chain

Drafts = TypeVar("Drafts", bound=PlannedTree | int)  # a tree, or the length of a chain
BATCH = 32  # rows, if tokens are counted and nothing is timed
SHAPE = 5  # repeats of the timing of each part; few, since the times are scaled to real rounds
TRIES = 3  # how often the draft length is chosen again after rounds at the chosen length were timed

# a chain's rule -> the rule of trees that may replace it; coupled and match are used only when named
RULES = {"token": "tree", "block": "traversal", "tree": "tree", "traversal": "traversal"}
CHILDREN = 4  # most children of a node
ENTRIES = 2**27  # most entries of the distributions that rate trees; it limits the number of texts
CANDIDATES = 2  # how many trees are run


@dataclass(frozen=True)
class MeasuredCosts:
    """The costs of the plan's rounds.

    alone: the costs of each part, timed separately. rounds: timed real rounds, keyed by draft length. costs: `alone`,
    scaled so that they fit the real rounds.
    """

    costs: Costs
    alone: Costs
    rounds: dict[int, RealRound]

    def at(self, rounds: dict[int, RealRound]) -> "MeasuredCosts":
        """Return new costs: `alone`, scaled to the earlier rounds and to `rounds` together. rounds: real rounds that
        were timed later, keyed by draft length."""
        together = self.rounds | rounds
        return MeasuredCosts(calibrated(self.alone, together), self.alone, together)


# --- costs


def measured_costs(plan: Plan, until: float = inf) -> MeasuredCosts:
    """Return the costs of the parts, scaled to timed real rounds of the plan's engines. until: the deadline for these
    rounds, a value of time.perf_counter()."""
    table = costs_of(plan)
    return MeasuredCosts(table, table, {}).at(rounds_of(plan, (0, *spans_of(plan.proposer())), until))


def costs_of(plan: Plan, most: int | None = None) -> Costs:
    """Return the costs of each part, timed separately at the benchmark's mean context length (for an encoder-decoder,
    with encoder inputs of their mean length). most: the longest draft to time; None for the longest of the plan's
    depths."""
    prompts, start = plan.prompts.ranking, start_of(plan.target)
    mean = sum(map(len, prompts)) // len(prompts)
    context = (mean if start is None else len(start)) + plan.bench.new_tokens // 2
    target = plan.engine(1).target  # with the slots of real rounds, so that the same CUDA graph is timed
    K = most or max(plan.depths)
    return measure_costs(
        target, plan.proposer(), K, context=context, source=mean, sampling=plan.sampling, repeats=SHAPE
    )


def rounds_of(plan: Plan, drafted: Sequence[Drafts], until: float = inf) -> dict[Drafts, RealRound]:
    """Return the seconds of real rounds with each tree or chain, timed in turn on ranking prompts, keyed by tree or
    length. drafted: trees, or lengths of chains; 0 is plain decoding. until: the deadline, a value of
    time.perf_counter(), after which no further rounds are timed than needed for a figure."""
    size, chains = plan.bench, [one for one in drafted if isinstance(one, int) and one]
    chain_engine = plan.engine(max(chains)) if chains else None
    engines: dict[Drafts, tuple[Engine, int]] = {}
    for one in drafted:
        if isinstance(one, PlannedTree):
            engines[one] = replace(plan, tree=one).engine(one.depth), one.depth
        else:
            engines[one] = chain_engine if one and chain_engine else plan.plain(), one
    prompts = plan.ranking(0, max(size.quick_prompts, size.rows))
    return measure_rounds(
        engines, prompts, sampling=plan.sampling, max_new_tokens=size.new_tokens, seed=size.seed, until=until
    )


# --- acceptance


def plain_texts(plan: Plan, count: int = BATCH) -> Emitted:
    """Return `count` texts of the target: ranking prompts, continued by plain decoding. Predictions are computed on
    them; nothing is timed."""
    size = plan.bench
    prompts = plan.ranking(size.quick_prompts, count)
    return interleave(plan.arms({"plain": plan.plain(BATCH)}), prompts, BATCH, size.seed, warmup=0).texts("plain")


def text_figures(plan: Plan, texts: Emitted, k: int, noise: float = 0.0) -> Figures:
    """Return the probabilities of both models on texts of the target, at draft length k. noise: the numerical noise of
    differences between the target's logits, as measured in the check of exactness."""
    engine, proposer = plan.engine(k, BATCH), plan.proposer()
    return pair_figures(engine, proposer, texts, plan.sampling, plan.bench.new_tokens, noise)


def measure_acceptance(plan: Plan, texts: Emitted | None = None) -> Acceptance:
    """Return the acceptance of the plan's draft at draft lengths 0 to the longest of the plan's depths. texts: the
    target's texts; None: new ones are decoded."""
    longest = max(plan.depths)
    return acceptance(text_figures(plan, texts or plain_texts(plan), longest), plan.verify, longest)


# --- the choice


def plan_draft(
    plan: Plan, costs: MeasuredCosts, texts: Emitted, until: float = inf
) -> tuple[Plan, MeasuredCosts, Forecast]:
    """Choose the draft length of a chain, or a tree if one is faster. The plan's own tree competes with others; if the
    plan has a planned length, its tree is drafted in any case.

    costs: of the plan's rounds. texts: the target's texts, on which acceptance is predicted. until: the deadline of
    timed rounds, a value of time.perf_counter().

    Returns the plan that drafts the choice, the costs of chains after scaling to the timed rounds, and the forecast.
    With several rows, the speed-ups of chains are for batches without waiting prompts, as they are timed; the speed-ups
    of trees are for full batches.
    """
    given, plan, rows = plan, replace(plan, tree=None), plan.bench.rows
    rates = measure_acceptance(plan, texts)
    chains, costs = plan_length(plan, costs, rates, until)
    if 1 < rows <= len(rates.lengths):
        chains, costs = plan_length(plan, costs, rates, until, measured_costs(plan.batched(1), until).costs.rounds)
    tree = best_tree(given, chains, texts, until)
    served = tree is not None and (plan.planned is not None or tree.gain > 0)
    plan = replace(plan, tree=tree.tree if tree and served else None)
    return plan, costs, replace(chains, tree=tree, serves_tree=served)


def plan_length(
    plan: Plan, costs: MeasuredCosts, rates: Acceptance, until: float = inf, one_row: Sequence[float] = ()
) -> tuple[Forecast, MeasuredCosts]:
    """Return the forecast with the fastest draft length among 1 and bench.depths (or with the planned length), and the
    costs. If no rounds at this length were timed, some are timed, and the length is chosen again with the costs scaled
    to them.

    rates: the draft's acceptance on texts. until: the deadline of timed rounds, a value of time.perf_counter().
    one_row: seconds of rounds with one row by draft length, if batches without waiting prompts are forecast; ()
    otherwise.
    """
    lengths = plan.depths if plan.planned else sorted({1, *plan.depths})

    def rated() -> Forecast:
        chains, rows = forecast(rates, costs.costs), plan.bench.rows
        if one_row:
            chains = replace(chains, speedups=alone(rates, {1: one_row, rows: costs.costs.rounds}, rows))
        return chains.among(lengths)

    for _ in range(TRIES):
        chains = rated()
        if chains.k in costs.rounds:
            break
        costs = costs.at(rounds_of(plan, (chains.k,), until))
    return rated(), costs


# --- trees


def best_tree(plan: Plan, chains: Forecast, texts: Emitted, until: float = inf) -> TreeForecast | None:
    """Return the tree with the fastest timed rounds per token, among trees of at most bench.trees nodes and the plan's
    own tree.

    chains: the forecast of chains on `texts`. texts: the target's texts. until: the deadline of timed rounds, a value
    of time.perf_counter(). Return None if the kind drafts no trees, if no tree rule can replace the plan's rule
    (`RULES`), or if there are no candidates.
    """
    given, plan = plan.tree, replace(plan, tree=None)
    if plan.verify not in RULES or not plan.bench.trees and given is None:
        return None
    if given is not None and _likeliest_only(plan):
        given = replace(given, likeliest=True)
    distributions = plain_distributions(plan, texts, given.depth if given else 0)
    if distributions is None:
        print(f"bench: {plan.kind} drafts are planned as chains: they draft no trees")
        return None
    trees: list[PlannedTree] = []
    if plan.bench.trees:
        trees = candidate_trees(tree_search(plan, distributions), tree_seconds(plan, until))[:CANDIDATES]
    trees += [given] if given is not None and given not in trees else []
    return fastest_tree(plan, chains, distributions, trees, until, in_turn=True)


def fastest_tree(
    plan: Plan,
    chains: Forecast,
    distributions: Distributions,
    trees: Sequence[PlannedTree],
    until: float = inf,
    in_turn: bool = False,
) -> TreeForecast | None:
    """Return the fastest of these trees, or None if there are none. Their rounds are timed in turn with plain decoding
    and the chain.

    chains: the forecast of chains at the plan's temperature and rows. distributions: both models' on the first of its
    texts. until: the deadline of timed rounds, a value of time.perf_counter(). in_turn: True: speed-ups are relative to
    the chain's seconds in these rounds. False: all seconds are scaled so that the chain's equal those in `chains`.
    """
    if not trees:
        return None
    k = chains.k
    drafted: dict[PlannedTree | int, None] = dict.fromkeys([0, k, *trees])
    rounds = rounds_of(plan, list(drafted), until)
    plain, chained = (rounds[at].seconds if in_turn else chains.seconds[at] for at in (0, k))
    scale = chained / rounds[k].seconds  # the chain's seconds may come from other rounds
    lengths = distributions.lengths.double()
    with_chain = chained * chains.acceptance.calls[k, : len(lengths)]
    rated = []
    for tree in trees:
        seconds, calls = rounds[tree].seconds * scale, tree_calls(distributions, tree)
        with_tree = seconds * calls
        total = float(with_tree.sum())
        faster = float(with_chain.sum()) / total
        tau, error = float(lengths.sum() / calls.sum()), error_of_sum(with_chain - faster * with_tree) / total
        rated.append(TreeForecast(tree, tau, seconds, plain * float(lengths.sum()) / total, faster - 1, error))
    return max(rated, key=lambda one: one.speedup)


def plain_distributions(plan: Plan, texts: Emitted, levels: int = 0) -> Distributions | None:
    """Return the distributions of both models on the texts, or on as many of the first texts as `ENTRIES` allows.
    Return None for kinds that draft no trees.

    A draft that is no language model has another distribution at each depth. Its distributions come from forced rounds
    of chains, as deep as the longest of the plan's depths, and with at least `levels` drafts.
    """
    if not kind_of(plan.kind).drafts_trees:
        return None
    vocabulary, new = plan.plain(1).target.vocabulary, plan.bench.new_tokens
    chains = replace(plan, tree=None).proposer()
    by_depth = chains.language_model(1, vocabulary) is None
    depths = max(*plan.depths, levels) if by_depth else 1
    size = max(1, ENTRIES // (vocabulary * new * depths))
    some = Emitted(texts.prompts[:size], texts.ids[:size], texts.tokens[:size], texts.counts[:size])
    rows = min(BATCH, len(some.tokens))
    draft = chains.language_model(rows, vocabulary)
    if draft is None:
        return distributions_of_rounds(plan.engine(depths, rows, chains), chains, depths, some, plan.sampling, new)
    return distributions_of(LM(plan.target, rows, vocabulary), draft, some, plan.sampling)


def tree_seconds(plan: Plan, until: float = inf) -> Seconds:
    """Return a model for the seconds of rounds with trees of up to bench.trees nodes, fitted to timed rounds of a few
    trees. until: the deadline of timed rounds, a value of time.perf_counter()."""
    most, likeliest = plan.bench.trees, plan.objective == "greedy"
    trees = [PlannedTree(parents, "tree", likeliest) for parents in probes(most, max(plan.depths))]
    rounds = rounds_of(plan, trees, until)
    return fitted_seconds(costs_of(plan, most), {tuple(tree.parents): rounds[tree] for tree in trees})


def tree_search(plan: Plan, distributions: Distributions) -> Search:
    """Return the search over trees of at most bench.trees nodes. distributions: both models', on texts. The children of
    a node are sampled or the most probable tokens; with greedy drafting and at temperature 0, only the latter."""
    most, sorts = plan.bench.trees, (True,) if _likeliest_only(plan) else (False, True)
    return Search(distributions, most, min(CHILDREN, most, distributions.p.shape[-1]), {1, *plan.depths}, sorts=sorts)


def candidate_trees(search: Search, seconds: Seconds) -> list[PlannedTree]:
    """Return the best tree for each rule and each way to choose children, fastest first. search: over trees. seconds:
    the model for the seconds of rounds."""
    return [PlannedTree(one.parents, one.rule, one.likeliest) for one in search.ranked(seconds, branching=True)]


def _likeliest_only(plan: Plan) -> bool:
    """Return whether children in trees can only be the most probable tokens."""
    return plan.objective == "greedy" or plan.sampling.temperature == 0


def tree_calls(distributions: Distributions, tree: PlannedTree) -> Tensor:
    """Return the expected target calls (N,) of each text if rounds draft this tree. distributions: both models', on the
    N texts."""
    reach = reach_under(distributions, tuple(tree.parents), tree.rule, tree.likeliest)
    return predict_chain.calls_from(reach, distributions.lengths)


# --- the choice, in words and for the report


def choice_line(chosen: Forecast) -> str:
    """Return a line for the user about the choice between chain and tree."""
    k, tree = chosen.k, chosen.tree
    if tree is None:
        return f"draft length {k}"
    if chosen.serves_tree:
        return f"{tree.words()}: {tree.speedup:.2f}x is expected with it, {tree.chain:.2f}x with a chain of {k}"
    return f"draft length {k}: {tree.speedup:.2f}x is expected with trees, {tree.chain:.2f}x with the chain"


def plan_entries(chosen: Forecast, rule: str) -> dict[str, Any]:
    """Return the report's entries about the plan: the chain's length and, if a tree is drafted instead, the tree.
    chosen: the forecast. rule: the verification rule for chains."""
    best, tree = chosen.tree, chosen.served.tree if chosen.served else None
    return {
        "planned_k": chosen.k,
        "planned_shape": list(tree.parents) if tree else None,
        "planned_rule": tree.rule if tree else rule,
        "planned_likeliest": tree.likeliest if tree else None,
        "planned_speedups": {"chain": best.chain, "tree": best.speedup} if best else None,
        "plain_is_faster": chosen.speedup <= 1,
        "predicted_speedups": list(chosen.speedups),
    }


def served_tree(extra: Mapping[str, Any]) -> PlannedTree | None:
    """Return the tree that was drafted, or None if chains were drafted. extra: the entry `extra` of a report."""
    if not extra.get("planned_shape"):
        return None
    return PlannedTree(extra["planned_shape"], extra["planned_rule"], extra["planned_likeliest"])


def advice(chosen: Forecast, speedup: Interval) -> str | None:
    """Return a sentence for the user if no speed-up was measured, otherwise None. chosen: the forecast of the chosen
    chain or tree. speedup: its measured speed-up over plain decoding."""
    drafted = f"{speedup.value:.2f}x " + (f"with {chosen.served.words()}" if chosen.served else f"at k = {chosen.k}")
    if speedup.faster is False:
        return (
            f"plain decoding is faster here: {drafted}, {chosen.speedup:.2f}x predicted, and no "
            "draft length does better: serve without this draft, or train a smaller or better one"
        )
    if isnan(speedup.low):
        return f"too few batches for an interval: {drafted}, {chosen.speedup:.2f}x predicted: raise bench.prompts="
    if speedup.faster is None:
        better = ", or train a smaller or better draft" if chosen.speedup <= 1 else ""
        return (
            f"no speed-up is shown: {drafted}, {chosen.speedup:.2f}x predicted, and its interval does not lie above 1: "
            f"raise bench.minutes=, or bench.prompts= if all were timed{better}"
        )
    return None
