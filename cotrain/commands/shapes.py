"""Draft shapes without a trained draft (`cotrain plan shapes=`): what a round of drafting costs on this machine, and
from which acceptance on drafts would pay.

A shape is a line of settings for `cotrain train`, such as `draft=eagle` or `draft.layers=1 draft.width=256
draft.vocabulary=4096 init=scratch`. The draft is built as for training, and timed untrained: the time of a round does
not depend on the weights.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from hydra import compose
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cotrain.config.groups import ServedTarget, Target
from cotrain.config.overrides import chosen, explain, quote
from cotrain.config.settings import PlanConfig, TrainConfig, checked, refuse_unread, sampling
from cotrain.errors import UserError
from cotrain.planning.drafted import costs_at
from cotrain.planning.forecast import at_acceptance, break_even
from cotrain.planning.plan import Plan
from cotrain.training.assembly import new_student
from cotrain.training.by_size import follow_target
from inference.measure.costs import Costs
from inference.report.table import aligned

ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)


def entry(settings: str, kind: str, parameters: int, costs: Mapping[int, Costs]) -> dict[str, Any]:
    """Return the entry of a shape in plan.json.

    settings: the shape, as settings of `cotrain train`. kind: the kind of draft. parameters: how many it has. costs:
    seconds of rounds, keyed by number of rows.

    For each number of rows, the entry has the seconds of rounds by draft length, the acceptance from which on drafts
    pay (`break_even`, None if no acceptance does), and `by_acceptance`: for each of `ACCEPTANCES`, the speed-up over
    plain decoding and the best draft length; length 0 means plain decoding.
    """
    rows = {
        str(count): {
            "seconds_per_round": list(one.rounds),
            "draft_step": one.draft,
            "cost": one.ratio,
            "break_even": break_even(one.rounds),
            "by_acceptance": {
                f"{a:g}": dict(zip(("speedup", "k"), at_acceptance(one.rounds, a), strict=True)) for a in ACCEPTANCES
            },
        }
        for count, one in costs.items()
    }
    return {"settings": settings, "kind": kind, "parameters": parameters, "rows": rows}


def composed_shape(settings: str, target: ServedTarget) -> TrainConfig:
    """Return the settings of `cotrain train` for one shape. settings: the shape, as "key=value key=value". target: what
    it drafts for. Raises UserError if a setting is unknown or wrong."""
    typed = quote(settings.split())
    try:
        cfg = checked("train", compose("train", overrides=typed))
    except UserError as error:
        raise UserError(f"shapes: {settings!r}: {error}") from error
    except Exception as error:  # Hydra's errors have no common class
        raise UserError(f"shapes: {settings!r}: {explain(error, 'train', typed)}") from error
    cfg.target = Target(**target.model_dump())
    follow_target(cfg, chosen(typed))
    refuse_unread(cfg, typed)
    return cfg


def timed_shape(
    cfg: PlanConfig, settings: str, config: TrainConfig, pair: tuple[PreTrainedModel, PreTrainedTokenizerBase]
) -> dict[str, Any]:
    """Time one of the draft shapes in `cfg.shapes`, and return its entry of plan.json. settings: the shape. config: the
    settings of `cotrain train` for it, from `composed_shape`. pair: the target and its tokenizer. Raises ValueError,
    which names the key, for a shape that does not fit the target."""
    target, tokenizer = pair
    words = len(cast(Any, tokenizer))
    student = new_student(config, target, words)
    if student.undecided or config.draft.vocabulary:
        student.know(torch.arange(words, 0, -1))  # which ids are known does not change the time
    network, kind = student.network, config.draft.kind
    size = sum(weight.numel() for weight in network.parameters())
    print(f"plan: shape {settings}, {size / 1e6:.2f} M parameters")
    plan = Plan(
        target,
        tokenizer,
        network,
        sampling(cfg.regime),
        "token",
        cfg.bench,
        (str(cfg.target.path), settings),
        kind=kind,
    )
    return entry(settings, kind, size, {rows: costs_at(plan, rows) for rows in cfg.batches})


def shape_table(timed: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the shapes as text. timed: the entries of plan.json, from `timed_shape`."""
    head = [
        "shape",
        "parameters",
        "rows",
        "draft step",
        "of a plain step",
        "break-even",
        *(f"at {a:g}" for a in ACCEPTANCES),
    ]
    rows = [head]
    for shape in timed:
        for count, cell in shape["rows"].items():
            edge, speeds = cell["break_even"], cell["by_acceptance"].values()
            rows.append(
                [
                    shape["settings"],
                    f"{shape['parameters'] / 1e6:.2f} M",
                    count,
                    f"{1e3 * cell['draft_step']:.2f} ms",
                    f"{cell['cost']:.2f}",
                    "-" if edge is None else f"{edge:.2f}",
                    *(f"{one['speedup']:.2f}x (k = {one['k']})" if one["k"] else "-" for one in speeds),
                ]
            )
    last = (
        "at A: the speed-up of a draft whose drafts are accepted with probability A at every depth, at its best "
        "draft length; -: plain decoding is faster"
    )
    return "\n".join([aligned(rows, left=1), last])
