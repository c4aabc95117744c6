"""Acceptance and speed by the weight quantisation of target and draft, and by temperature."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cotrain.bench.measurement import Plan
from cotrain.bench.planner import BATCH, tau_of
from inference.exactness.side_by_side import pair_figures
from inference.measure.timing import engine_arm, interleave
from inference.proposers.quantised import BITS, in_bits

KINDS = ("none", "int8", "nf4")
Load = Callable[[str], PreTrainedModel]  # the target, held as a quantisation of `target_model.QUANTISATIONS`


def quantised(weight: Tensor, kind: str) -> Tensor:
    """weight (out, in) as numbers that `kind` can hold, in its own dtype, see `quantised.in_bits`. Raises ValueError
    for another kind."""
    if kind == "none":
        return weight
    if kind in BITS:
        return in_bits(weight, kind)
    raise ValueError(f"matrix.drafts: {kind!r} is none of {', '.join(KINDS)}")


@torch.no_grad()
def rounded(draft: PreTrainedModel, kind: str) -> PreTrainedModel:
    """A copy whose projections are held so, the head as bitsandbytes leaves it: in int8 as a CPU serves it here, in nf4
    whole. Its embeddings keep their numbers, tied to the head or not."""
    made = copy.deepcopy(draft)
    head = made.get_output_embeddings()
    for weight in projections(made).values():
        weight.copy_(quantised(weight, kind))
    if kind == "int8" and head is not None:
        head.weight = nn.Parameter(quantised(head.weight, kind), requires_grad=False)  # not the embeddings tied to it
    return made


def projections(draft: PreTrainedModel) -> dict[str, Tensor]:
    """Weights of its matrix products, but the head's, by name."""
    head = draft.get_output_embeddings()
    linear = [(name, module) for name, module in draft.named_modules() if isinstance(module, nn.Linear)]
    return {name: module.weight for name, module in linear if module is not head}


def refuse_unknown(draft: PreTrainedModel, key: str = "draft.quantisation") -> None:
    """Raise ValueError, beginning with the key, for a draft with matrices that are no `nn.Linear`, as those of GPT-2 or
    fused experts: they would stay whole here, and be rounded, or refused, where it is served."""
    known = {id(weight) for weight in projections(draft).values()}
    known |= {id(module.weight) for module in draft.modules() if isinstance(module, nn.Embedding)}
    if (head := draft.get_output_embeddings()) is not None:  # heads that read a target's states have none
        known.add(id(head.weight))
    others = [name for name, weight in draft.named_parameters() if weight.ndim > 1 and id(weight) not in known]
    if others:
        raise ValueError(f"{key}: {type(draft).__name__} has {len(others)} matrices that are no nn.Linear, whose "
                         f"rounding is not known ({others[0]}): ask for none")  # fmt: skip


def table(plan: Plan, load: Load, targets: Sequence[str], drafts: Sequence[str], temperatures: Sequence[float], k: int,
          say: Callable[[str], None] = print) -> list[dict[str, Any]]:  # fmt: skip
    """One entry a target, temperature and draft: alpha = sum_v min(p, q) and tau(k) on texts of that very target, and
    the speed-up over its own plain decoding on a few prompts; nf4 drafts are timed as what they hold, in bfloat16. Of a
    draft whose law depends on the depth alpha is of its first draft."""
    cells = []
    for target in targets:
        plan = replace(plan, target=load(target))
        for temperature in temperatures:
            here = replace(plan, sampling=replace(plan.sampling, temperature=temperature))
            texts = _texts(here)
            for draft in drafts:
                cells.append({"target": target, "temperature": temperature, "draft": draft, "k": k}
                             | _cell(_with(here, draft), texts, k))  # fmt: skip
                say(line(cells[-1]))
    return cells


def _with(plan: Plan, kind: str) -> Plan:
    bench = copy.copy(plan.bench)
    bench.draft_int8 = kind == "int8"
    return replace(plan, draft=rounded(plan.served, kind), bench=bench)


def _texts(plan: Plan) -> Any:
    size = plan.bench
    prompts = plan.ranking(size.quick_prompts, 2 * BATCH)
    arm = engine_arm("plain", plan.plain(BATCH), plan.sampling, size.new_tokens)
    return interleave([arm], prompts, BATCH, size.seed, warmup=0).texts("plain")


def _cell(plan: Plan, texts: Any, k: int) -> dict[str, Any]:
    size, sampling = plan.bench, plan.sampling
    counted = plan.student(plan.draft).proposer(greedy=plan.objective == "greedy")
    figures = pair_figures(plan.engine(k, BATCH), counted, texts, sampling, size.new_tokens, 0.0)
    tokens, drafted = figures.lengths.sum(), figures.k > 0  # where a round drafts
    arms = [engine_arm("speculative", plan.engine(k), sampling, size.new_tokens),
            engine_arm("plain", plan.plain(), sampling, size.new_tokens)]  # fmt: skip
    timing = interleave(arms, plan.ranking(0, size.quick_prompts), size.rows, size.seed)
    return {
        "alpha": float(figures.first(figures.alpha)[drafted].sum() / max(int(drafted.sum()), 1)),
        "tau": tau_of(figures, plan.verify, k),
        "tokens": int(tokens),
        "speedup": timing.ratio("speculative", "plain")._asdict(),
        "plain": timing.speed("plain"),
    }


def line(cell: dict[str, Any]) -> str:
    ratio, who = cell["speedup"], f"target {cell['target']:<4}  T {cell['temperature']:<4g} draft {cell['draft']:<4}"
    return (f"{who}  alpha {cell['alpha']:.3f}  tau({cell['k']}) {cell['tau']:.3f}  {ratio['value']:.2f}x "
            f"[{ratio['low']:.2f}, {ratio['high']:.2f}] of {cell['plain']:.0f} tokens/s")  # fmt: skip
