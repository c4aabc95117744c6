"""Costs and speed-up of shapes that are too large to train here: random weights, simulated acceptance, real clocks."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from transformers import PreTrainedModel

from cotrain.acceptance import iid_tau
from cotrain.config.groups import Bench
from cotrain.students.base import DEFAULT, student_class
from inference import Sampling
from inference.engine import Engine
from inference.measure.costs import best_k, measure_costs
from inference.measure.floor import measure_machine, round_loads
from inference.measure.random_weights import Synthetic
from inference.measure.timing import engine_arm, interleave
from inference.models.lm import LM
from inference.policy import Fixed

BATCHES = 3  # batches of prompts, at least: an interval needs them


def measure(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    alpha: float,
    sampling: Sampling,
    size: Bench,
    batches: Sequence[int],
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """One entry a batch size: the cost table, the speed-up that it predicts at its best draft length, the measured one
    with each draft accepted with probability alpha, and the floor's share of each."""
    machine = measure_machine(target.device, target.dtype)
    cells = []
    for rows in batches:
        cells.append(_cell(target, draft, alpha, sampling, size, rows) | {"machine": asdict(machine)})
        models = LM(target, rows), LM(draft, rows)
        for name, drafted in (("plain", 0), ("round", cells[-1]["k"])):
            loads = round_loads(*models, drafted, rows, _context(size))
            cells[-1][f"{name}_share"] = sum(load.seconds(machine) for load in loads) / cells[-1][f"{name}_seconds"]
        say(line(cells[-1]))
    return cells


def _context(size: Bench) -> int:
    return size.prompt_tokens + size.new_tokens // 2


def _cell(
    target: PreTrainedModel, draft: PreTrainedModel, alpha: float, sampling: Sampling, size: Bench, rows: int
) -> dict[str, Any]:
    settings: dict[str, Any] = {"rows": rows, "compile": size.compile}
    plain = Engine(target, **settings)
    proposer = student_class(DEFAULT)(draft, target).proposer(compile=size.compile)
    costs = measure_costs(plain.target, proposer, max(size.depths), context=_context(size), sampling=sampling)
    choice = best_k(costs, lambda k: iid_tau(alpha, k))
    k = max(choice.k, 1)
    arms = [
        engine_arm("speculative", Synthetic(target, alpha=alpha, policy=Fixed(k), **settings,
                   proposer=proposer), sampling, size.new_tokens),
        engine_arm("plain", plain, sampling, size.new_tokens),
    ]  # fmt: skip
    count = max(size.prompts, BATCHES * rows)
    vocabulary, seeded = target.config.get_text_config().vocab_size, torch.Generator().manual_seed(size.seed)
    prompts = torch.randint(vocabulary, (count, size.prompt_tokens), generator=seeded).tolist()
    timing = interleave(arms, prompts, rows, size.seed)
    stats = timing.stats("speculative")
    assert stats is not None
    return {
        "rows": rows, "alpha": alpha, "k": k, "tau": stats.tau, "costs": asdict(costs),
        "plain_seconds": costs.round(0), "round_seconds": costs.round(k), "predicted": choice.speedups[k],
        "measured": timing.ratio("speculative", "plain", decode=True)._asdict(),
        "tokens_per_second": {arm: timing.speed(arm) for arm in timing.arms},
    }  # fmt: skip


def line(cell: dict[str, Any]) -> str:
    """An entry as a line, which says that weights and acceptance are synthetic."""
    ratio = cell["measured"]
    return (
        f"SYNTHETIC, random weights, acceptance {cell['alpha']:g} by coins: {cell['rows']} rows, k {cell['k']}, "
        f"tau {cell['tau']:.2f}, decoding {ratio['value']:.2f}x [{ratio['low']:.2f}, {ratio['high']:.2f}], predicted "
        f"{cell['predicted']:.2f}x; floor {100 * cell['plain_share']:.0f} % of a plain step, "
        f"{100 * cell['round_share']:.0f} % of a round"
    )
