"""A draft's confidence head: fitted after the training, on texts that the draft learnt from, and judged on held-out texts.

The head predicts alpha = sum_v min(p, q), the probability that a draft is accepted if all drafts before it were, both
distributions as served (greedy drafting: p(argmax q)). Cross-entropy with alpha as a soft label is a proper score,
whose minimum is alpha itself, and convex in the head. The draft's own weights do not change. All is computed from
guesses, so any student whose network has a `confidence_head` can use it.

N drafts, D numbers that the head reads, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from cotrain import losses
from cotrain.data.texts import Texts
from cotrain.evaluation.held_out import HeldOut, guessed
from cotrain.losses.chunked import CHUNK, log_probs, served
from cotrain.students.base import ANY, LAST, Student
from cotrain.teacher.target_model import Head
from inference.proposers.confidence import ConfidenceHead

DRAFTS = 32768  # that a fit reads
BINS = 15  # of equal mass
RIDGE = 1e-4  # of the squared weights, in units of the inputs' standard deviations
STEPS, FLAT = 50, 1e-10  # of Newton's method, and the slope where it ends
SCORES = ("confidence", "entropy", "margin", "top", "oracle")


@dataclass(frozen=True)
class Drafts:
    """Drafts that a student would make on texts, with what is known before their tokens are drawn, (N,) each.

    alpha: probability that it is accepted if all before it were. confidence: alpha as the head predicts it. entropy
    (nats), margin, top: of q as trained; margin: between the two likeliest tokens, top: the likeliest one's
    probability. depth: 0-based.
    """

    alpha: Tensor
    confidence: Tensor
    entropy: Tensor
    margin: Tensor
    top: Tensor
    depth: Tensor

    def at(self, chosen: Tensor) -> "Drafts":
        return Drafts(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def __len__(self) -> int:
        return len(self.alpha)


def head_of(student: Student) -> ConfidenceHead | None:
    """The student's confidence head, None without one."""
    head: ConfidenceHead | None = getattr(student.network, "confidence_head", None)
    return head


# --- the fit


def chosen(texts: Texts, temperature: float, depths: int) -> Texts:
    """The texts that a fit reads: those of the temperature, if there are any, else some of all; about `DRAFTS` drafts on
    their sampled tokens."""
    own = (texts.temperature.expand(len(texts)) == temperature).nonzero().squeeze(-1).tolist()
    texts = texts.rows(own) if own else texts
    drafts = int(texts.sampled.sum()) * depths / max(len(texts), 1)
    return texts.spread(max(math.ceil(DRAFTS / max(drafts, 1)), 1)).at(temperature)


def fit(held: HeldOut, student: Student, head_target: Head, greedy: bool = False) -> int:
    """Fit the student's confidence head to its drafts on texts; returns their number. greedy: the draft's likeliest
    tokens are drafted. Raises ValueError for a student without such a head."""
    head = head_of(student)
    if head is None:
        raise ValueError(f"{type(student.network).__name__} has no confidence head: draft.confidence=true")
    parts = [(read, drafts.alpha) for read, drafts in _drafts(held, student, head_target, greedy)]
    read, alpha = (torch.cat(side) for side in zip(*parts, strict=True))
    weight, bias = logistic(read.double(), alpha.double())
    with torch.no_grad():
        head.proj.weight.copy_(weight.unsqueeze(0))
        head.proj.bias.fill_(float(bias))
    return len(alpha)


def logistic(x: Tensor, y: Tensor, ridge: float = RIDGE) -> tuple[Tensor, Tensor]:
    """Weights (D,) and bias () that minimise the mean cross-entropy of sigmoid(x w + b) with labels y in [0, 1], plus
    ridge / 2 times the sum of the squares of w times the deviations of x. x (N, D), y (N,), in float64.

    Newton's method with halved steps: the objective is convex, so it ends at its minimum.
    """
    mean, deviation = x.mean(0), x.std(0, correction=0)
    scale = torch.where(deviation > 0, deviation, 1.0)
    z = torch.cat(((x - mean) / scale, torch.ones_like(x[:, :1])), 1)
    held = torch.full_like(z[0], ridge).index_fill(0, torch.tensor(len(z[0]) - 1, device=z.device), 0.0)

    def objective(w: Tensor) -> Tensor:
        logits = z @ w
        return (torch.nn.functional.softplus(logits) - y * logits).mean() + held @ w.square() / 2

    w = torch.zeros_like(z[0])
    for _ in range(STEPS):
        share = torch.sigmoid(z @ w)
        slope = z.T @ (share - y) / len(y) + held * w
        if float(slope.abs().max()) < FLAT:
            break
        bend = (z * (share * (1 - share)).unsqueeze(1)).T @ z / len(y) + torch.diag(held)
        step = torch.linalg.solve(bend, slope)
        now, size = objective(w), 1.0
        while float(objective(w - size * step)) > float(now) and size > FLAT:
            size /= 2
        w = w - size * step
    weight = w[:-1] / scale
    return weight, w[-1] - mean @ weight


# --- the judgement


def judged(
    held: HeldOut, student: Student, head_target: Head, greedy: bool = False, read: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """Figures of the student's confidence head on texts that neither the draft nor the head learnt from, see `figures`;
    `by_depth` has those of each depth, if there are several. read: called with the number of texts of each batch."""
    parts = [drafts for _, drafts in _drafts(held, student, head_target, greedy, read)]
    drafts = Drafts(*(torch.cat([getattr(part, field.name) for part in parts]).cpu() for field in fields(Drafts)))
    depths = [] if int(drafts.depth.max()) == ANY else range(int(drafts.depth.max()) + 1)
    by_depth = [figures(drafts.at(drafts.depth == depth)) for depth in depths]
    return {"temperature": held.temperature, "bins": BINS, "all": figures(drafts),
            "reliability": reliability(drafts.confidence, drafts.alpha), "by_depth": by_depth}  # fmt: skip


def figures(drafts: Drafts) -> dict[str, Any]:
    """Number of drafts; means of alpha and of the confidence; expected calibration error; and by score the area under
    the ROC curve of "accepted": of the confidence, of the draft's entropy, margin and top probability, and of alpha
    itself, which no score exceeds."""
    scores = {"confidence": drafts.confidence, "entropy": -drafts.entropy, "margin": drafts.margin, "top": drafts.top,
              "oracle": drafts.alpha}  # fmt: skip
    return {
        "drafts": len(drafts),
        "alpha": float(drafts.alpha.double().mean()),
        "confidence": float(drafts.confidence.double().mean()),
        "calibration_error": calibration_error(drafts.confidence, drafts.alpha),
        "area": {name: area(score, drafts.alpha) for name, score in scores.items()},
    }


def reliability(confidence: Tensor, alpha: Tensor, bins: int = BINS) -> list[dict[str, float]]:
    """By bin, in order of confidence, as many drafts in each: their number, mean confidence and mean alpha."""
    order = confidence.argsort(stable=True)
    parts = zip(confidence[order].double().tensor_split(bins), alpha[order].double().tensor_split(bins), strict=True)
    return [{"drafts": len(sure), "confidence": float(sure.mean()), "alpha": float(accepted.mean())}
            for sure, accepted in parts if len(sure)]  # fmt: skip


def calibration_error(confidence: Tensor, alpha: Tensor, bins: int = BINS) -> float:
    """Expected calibration error: |mean confidence - mean alpha| of bins of equal mass, averaged over drafts (Nguyen
    and O'Connor 2015, 1508.05154). Exact labels alpha, so no coin adds noise."""
    table = reliability(confidence, alpha, bins)
    gaps = sum(one["drafts"] * abs(one["confidence"] - one["alpha"]) for one in table)
    return gaps / max(len(alpha), 1)


def area(score: Tensor, alpha: Tensor) -> float | None:
    """Area under the ROC curve: the probability that an accepted draft has a higher score than a rejected one, ties
    counting half. Each draft is accepted with weight alpha and rejected with weight 1 - alpha, so the area is exact and
    no acceptance is sampled. None if all drafts are accepted, or none."""
    order = score.argsort(stable=True)
    sorted_alpha = alpha[order].double()
    _, group = score[order].unique_consecutive(return_inverse=True)
    accepted, rejected = (sorted_alpha.new_zeros(len(score)).index_add(0, group, weight)
                          for weight in (sorted_alpha, 1 - sorted_alpha))  # fmt: skip
    pairs = accepted.sum() * rejected.sum()
    if not float(pairs) > 0:
        return None
    return float((accepted * (rejected.cumsum(0) - rejected / 2)).sum() / pairs)


def line(figures: dict[str, Any]) -> str:
    """One line: calibration and areas."""
    of = figures["all"]
    areas = ", ".join(f"{name} {value:.3f}" for name, value in of["area"].items() if value is not None)
    return (f"confidence head at T {figures['temperature']:g}: calibration error {of['calibration_error']:.3f} on "
            f"{of['drafts']} held-out drafts; area under the ROC curve: {areas}")  # fmt: skip


@torch.no_grad()
def _drafts(
    held: HeldOut, student: Student, head_target: Head, greedy: bool = False,
    read: Callable[[int], None] | None = None, batch: int = 16,
) -> Iterator[tuple[Tensor, Drafts]]:  # fmt: skip
    """Chunks of the drafts of all depths on the texts' sampled tokens, with what the head reads of each (n, D). read:
    called after each batch of texts with their number."""
    head = head_of(student)
    assert head is not None
    for rows in torch.arange(len(held.texts)).split(batch):
        guesses, record = guessed(held, rows, student)
        inside = pad(held.texts.predicted[rows], (0, 1)).flatten()
        for guess in guesses:
            at = guess.at.cpu()
            for i in inside[at].nonzero().squeeze(-1).to(guess.at.device).split(CHUNK):
                states, theirs = guess.states[i], record[LAST].flatten(0, 1)[guess.at[i]]
                t = torch.full((len(i),), held.temperature, device=states.device)
                logp = served(log_probs(head_target(theirs), t), t, held.truncate)
                logq = log_probs(guess.head(states), t)
                alpha = losses.alpha_greedy(logp, logq) if greedy else losses.alpha(logp, served(logq, t, held.truncate))
                first, second = logq.topk(2).values.exp().unbind(-1)
                depth = torch.full((len(i),), guess.depth)
                yield states[:, : head.width], Drafts(alpha, head(states[:, : head.width]), losses.entropy(logq),
                                                      first - second, first, depth)  # fmt: skip
        if read:
            read(len(rows))
