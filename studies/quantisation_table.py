"""Table of acceptance and speed. It has one row per weight quantisation of target and draft, and per temperature."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from cotrain.planning.forecast import acceptance
from cotrain.planning.plan import Plan
from cotrain.planning.planner import BATCH
from cotrain.students.quantised import draft_projections
from inference.exactness.side_by_side import pair_figures
from inference.measure.timing import interleave
from inference.models.small_heads import linears
from inference.proposers.quantised import BITS, round_bits

Load = Callable[[str], PreTrainedModel]  # the target in a quantisation of `target_model.QUANTISATIONS`
QUANTISATIONS = ("none", *BITS)  # of a draft


def table(
    plan: Plan,
    load: Load,
    targets: Sequence[str],
    drafts: Sequence[str],
    temperatures: Sequence[float],
    k: int,
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Measure each combination of target quantisation, temperature and draft quantisation. Return one entry per
    combination.

    alpha = sum_v min(p, q) and tau at draft length k are computed on texts of the quantised target. If q depends on the
    depth, alpha is that of a round's first draft. The speed-up is over plain decoding of this target, on a few prompts.
    Drafts in nf4 are timed with their rounded weights in bfloat16."""
    cells = []
    for target in targets:
        plan = replace(plan, target=load(target))
        for temperature in temperatures:
            here = replace(plan, sampling=replace(plan.sampling, temperature=temperature))
            texts = _texts(here)
            for draft in drafts:
                cells.append(
                    {"target": target, "temperature": temperature, "draft": draft, "k": k}
                    | _cell(_with(here, draft), texts, k)
                )
                say(line(cells[-1]))
    return cells


def _with(plan: Plan, kind: str) -> Plan:
    bench = copy.copy(plan.bench)
    bench.draft_int8 = kind == "int8"
    return replace(plan, draft=rounded_draft(plan.served, kind), bench=bench)


@torch.no_grad()
def rounded_draft(draft: PreTrainedModel, quantisation: str) -> PreTrainedModel:
    """Return a copy of a draft whose projections are rounded as when served. quantisation: "none", "int8" or "nf4".
    With int8 the head is rounded too; with nf4 it is not, since bitsandbytes leaves it unchanged. Embeddings are never
    rounded, even if they share their weights with the head."""
    network = copy.deepcopy(draft)
    for weight in draft_projections(network).values() if quantisation in BITS else ():
        weight.copy_(round_bits(weight, quantisation))
    if quantisation == "int8":
        for part in linears(network.get_output_embeddings()):  # new tensors: embeddings tied to the head stay whole
            part.weight = nn.Parameter(round_bits(part.weight, quantisation), requires_grad=False)
    return network


def _texts(plan: Plan) -> Any:
    size = plan.bench
    prompts = plan.ranking(size.quick_prompts, 2 * BATCH)
    return interleave(plan.arms({"plain": plan.plain(BATCH)}), prompts, BATCH, size.seed, warmup=0).texts("plain")


def _cell(plan: Plan, texts: Any, k: int) -> dict[str, Any]:
    size, sampling = plan.bench, plan.sampling
    counted = plan.student(plan.draft).proposer(greedy=plan.objective == "greedy")
    figures = pair_figures(plan.engine(k, BATCH), counted, texts, sampling, size.new_tokens, 0.0)
    tokens, drafted = figures.lengths.sum(), figures.k > 0  # positions at which a round has drafts
    arms = plan.arms({"speculative": plan.engine(k), "plain": plan.plain()})
    timing = interleave(arms, plan.ranking(0, size.quick_prompts), size.rows, size.seed)
    return {
        "alpha": float(figures.first(figures.alpha)[drafted].sum() / max(int(drafted.sum()), 1)),
        "tau": acceptance(figures, plan.verify, k).tau(k),
        "tokens": int(tokens),
        "speedup": timing.ratio("speculative", "plain")._asdict(),
        "plain": timing.speed("plain"),
    }


def line(cell: dict[str, Any]) -> str:
    ratio, who = cell["speedup"], f"target {cell['target']:<4}  T {cell['temperature']:<4g} draft {cell['draft']:<4}"
    return (
        f"{who}  alpha {cell['alpha']:.3f}  tau({cell['k']}) {cell['tau']:.3f}  {ratio['value']:.2f}x "
        f"[{ratio['low']:.2f}, {ratio['high']:.2f}] of {cell['plain']:.0f} tokens/s"
    )
