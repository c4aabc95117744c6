"""Choice of the exit of an early-exit draft before training: the number of layers with the best expected speed-up.

The acceptance of a trained exit is not known yet. So each exit is rated by a linear exit (Belrose et al. 2023,
arXiv:2303.08112): a ridge regression from the normed states after L layers to the input states of the target's head. It
is fitted on some texts of the target and evaluated on others. With draft.rank > 0 the draft's training also changes the
layers up to the exit, which raises acceptance above the linear exit's. Costs are measured at the first and the last
exit and interpolated, since all layers cost the same.

N tokens, n tokens of one text, D width, B texts, T tokens of the longest text, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cotrain.data.splits import SPLITS, apart
from cotrain.planning.forecast import Acceptance, acceptance, forecast
from cotrain.planning.plan import Plan
from cotrain.planning.planner import costs_of, plain_texts
from cotrain.ranks import awaited, rank
from cotrain.students.base import student_class
from cotrain.students.early_exit import candidate_exits
from cotrain.teacher.target_model import Head, served
from cotrain.training.job import Job
from inference.drafts.atomic import write_json
from inference.drafts.weight_files import read_json
from inference.exactness.figures import Figures
from inference.measure.costs import Costs
from inference.models.passes import LAST
from inference.models.pretrained import decoder_layers
from inference.output import Emitted
from inference.proposers.early_exit import final_norm, untrained_exit
from inference.sampling import at_ids, certain, probs

FILE = "exit_plan.json"  # in the run's folder, so that a resumed run has the same exit


class TextStates(NamedTuple):
    """One text with the states that predict it. x (n,): its token ids. states: layer -> (n, D); row i predicts x[i]. A
    layer's states are after the target's last norm; LAST is the input of the target's head."""

    x: Tensor
    states: Mapping[int, Tensor]


def rated(layers: int, rates: Acceptance, costs: Costs, depths: Sequence[int]) -> dict[str, Any]:
    """Return the rating of an exit at its best draft length, 1 or one of `depths`, as an entry of the exit plan.

    layers: how many decoder layers draft. rates: the acceptance of the linear exit. costs: the costs of its rounds.
    depths: draft lengths.

    Entries of the result: layers. alpha: mean acceptance of the linear exit. k, tau: the draft length and its tokens
    per target call. cost: seconds of one draft step over seconds of a plain step. speedup: the expected one over plain
    decoding.
    """
    chains = forecast(rates, costs).among(sorted({1, *depths}))
    return {
        "layers": layers,
        "alpha": rates.alpha,
        "k": chains.k,
        "tau": chains.tau,
        "cost": costs.ratio,
        "speedup": chains.speedup,
    }


def between(low: Costs, high: Costs, share: float) -> Costs:
    """Return costs interpolated between two exits, `low` and `high`. share: from 0 (low) to 1 (high)."""
    return replace(
        low, draft=low.draft + share * (high.draft - low.draft), first=low.first + share * (high.first - low.first)
    )


def line_of(f: Tensor, s: Tensor) -> Tensor:
    """Return the matrix W (D + 1, D) float64 with which f + [f, 1] W approximates s best. f, s (N, D): states after the
    exit's layers, and the input of the target's head, of the same tokens.

    It is fitted by ridge regression. The regularisation weight is the mean squared norm of the rows [f, 1], so W stays
    small if N is small.
    """
    x = _with_one(f)
    ridge = x.square().sum() / len(x) * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    return torch.linalg.solve(x.T @ x + ridge, x.T @ (s - f).double())


def moved(f: Tensor, w: Tensor) -> Tensor:
    """Return f + [f, 1] W, (N, D), in the dtype of f. f (N, D). w: the matrix W (D + 1, D)."""
    return (f.double() + _with_one(f) @ w).to(f.dtype)


def _with_one(f: Tensor) -> Tensor:
    """Return [f, 1] (N, D + 1) in float64. f (N, D)."""
    return torch.nn.functional.pad(f.double(), (0, 1), value=1.0)


def exit_figures(layer: int, texts: Sequence[TextStates], head: Head, plan: Plan) -> Figures:
    """Return the probabilities of the target and of the linear exit after `layer` layers, on every second text. The
    exit is fitted on the other texts. head: the target's last states (n, D) -> logits (n, V). plan: has the regime, the
    way of drafting and the draft lengths."""
    fit, judged = texts[0::2], texts[1::2]
    w = line_of(*(torch.cat([text.states[part] for text in fit]) for part in (layer, LAST)))
    lengths = torch.tensor([len(text.x) for text in judged])
    rows = torch.zeros(3, len(judged), int(lengths.max()), dtype=torch.float64)
    for row, text in enumerate(judged):
        p = probs(head(text.states[LAST]), plan.sampling)
        q = probs(head(moved(text.states[layer], w)), plan.sampling)
        q = certain(q) if plan.objective == "greedy" else q
        px, qx = (at_ids(distribution, text.x).double().cpu() for distribution in (p, q))
        rows[0, row, : len(px)] = px.clamp(min=torch.finfo(torch.float32).tiny).log()
        rows[1, row, : len(px)] = qx.log()
        rows[2, row, : len(px)] = torch.minimum(p, q).sum(1).double().cpu()
    k = torch.full(rows.shape[1:], max(plan.depths))
    none = torch.zeros_like(k, dtype=torch.bool)
    return Figures(rows[0], rows[1], rows[2], none, none, k, lengths)


@torch.inference_mode()
def read_states(
    texts: Emitted, target: PreTrainedModel, vocabulary: int, layers: Sequence[int]
) -> tuple[list[TextStates], Head]:
    """Return the states that predict each new token, one entry per text, and the target's head, states (n, D) -> logits
    (n, V). texts: prompts and new tokens of the target. vocabulary: V. layers: the numbers of decoder layers after
    which states are read; LAST is always included."""
    reader, head = served(target, vocabulary, layers)
    norm, rows = final_norm(target), []
    for prompt, text in zip(texts.prompts, texts.tokens, strict=True):
        ids = torch.tensor([prompt + text], device=target.device)
        last = {name: part[0, len(prompt) - 1 :] for name, part in reader(ids[:, :-1]).items()}
        normed = {name: part if name == LAST else norm(part) for name, part in last.items()}
        rows.append(TextStates(ids[0, len(prompt) :], normed))
    return rows, head


def exit_plan(job: Job, layers: int) -> Plan:
    """Return a plan to measure an untrained exit after `layers` decoder layers, on the run's ranking prompts."""
    cfg = job.cfg
    network = untrained_exit(job.target, layers, 0, cfg.draft.depths or 1)
    torch.nn.Module.to(network, job.target.device, job.target.dtype)
    prompts = None  # the shipped ones
    if cfg.data.path:
        ranking, final = (job.source(s).several(cfg.rollout.prompt_tokens, cfg.rollout.seed) for s in SPLITS[1:])
        prompts = apart(ranking, final, [], "own")
    return replace(job.plan_with(network, prompts), kind="early_exit")


def exits(job: Job) -> list[dict[str, Any]]:
    """Return one rating for each exit to choose from: a dictionary with its number of layers, acceptance, draft length,
    tau, cost and speed-up (`rated`)."""
    layers = candidate_exits(len(decoder_layers(job.target)))
    ends = [exit_plan(job, at) for at in (layers[0], layers[-1])]
    low, high = (costs_of(plan) for plan in ends)
    plan, span = ends[0], max(layers[-1] - layers[0], 1)
    texts, head = read_states(plain_texts(plan), job.target, job.vocabulary, layers)
    rows = []
    for at in layers:
        rates = acceptance(exit_figures(at, texts, head, plan), plan.verify, max(plan.depths))
        rows.append(rated(at, rates, between(low, high, (at - layers[0]) / span), plan.depths))
    return rows


def plan_exits(job: Job) -> dict[str, Any] | None:
    """Choose draft.layers if it is null: set it in the job's settings, in place, print the ratings of the exits, and
    return them with the choice. Return None if there is nothing to choose: for other kinds, if draft.layers is set, and
    for init=pretrained, which fixes the exit.

    Among exits with equal speed-up, the one with the fewest layers is chosen. The choice is written to the run's
    folder, where a resumed run and the other processes of the run read it.
    """
    draft: Any = job.cfg.draft
    if not student_class(draft.kind).open_layers or draft.layers or draft.bits or job.cfg.init.kind == "pretrained":
        return None
    path = job.folder / FILE
    if rank():
        awaited(path.is_file, f"the process that makes {path}")
    if not path.is_file():
        rows = exits(job)
        best = max(rows, key=lambda one: (one["speedup"], -one["layers"]))
        write_json(path, {"layers": best["layers"], "exits": rows})
    plan = read_json(path)
    draft.layers = plan["layers"]
    print("\n".join(exit_lines(plan)))
    return plan


def exit_lines(plan: Mapping[str, Any]) -> list[str]:
    """Return the ratings of the exits and the choice as lines for the user. plan: from `plan_exits`."""
    rows = [
        f"{one['layers']:6} {one['alpha']:10.3f} {one['cost']:6.3f} {one['k']:3} {one['tau']:5.2f} "
        f"{one['speedup']:7.2f}x"
        for one in plan["exits"]
    ]
    chosen = next(one for one in plan["exits"] if one["layers"] == plan["layers"])
    return [
        "draft.layers: a linear exit, fitted and judged on texts of the target; costs measured here",
        "layers acceptance   cost   k   tau speed-up",
        *rows,
        f"draft.layers={chosen['layers']}: {chosen['speedup']:.2f}x expected at k = {chosen['k']}, before training",
    ]
