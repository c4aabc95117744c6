"""A draft's confidence head. It is fitted after the training, on texts set aside for it, and evaluated on held-out
texts.

The head predicts alpha = sum_v min(p, q), the probability that a draft is accepted if all drafts before it were. Both
distributions are as served; with greedy drafting alpha is p(argmax q). Cross-entropy with alpha as a soft label is a
proper score, whose minimum is alpha itself, and it is convex in the head. The draft's own weights do not change. All
figures are computed from guesses, so any student whose network has a `confidence_head` can use this module.

N drafts, D inputs of a linear map, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from cotrain import losses
from cotrain.acceptance import l_from
from cotrain.data.texts import Texts
from cotrain.errors import UserError
from cotrain.evaluation.held_out import HeldOut, guessed
from cotrain.losses.chunked import CHUNK, log_probs, served
from cotrain.students.base import ANY, LAST, Student
from cotrain.teacher.target_model import Head
from inference.proposers.confidence import ConfidenceHead, measures
from inference.sampling import one_hot

DRAFTS = 32768  # that a fit reads
EVERY = 4  # one round in so many is read if there are enough texts: drafts of a text are alike, more texts say more
BINS = 15  # of equal mass
RIDGE = 1e-3  # of the squared weights, in units of the inputs' standard deviations
STEPS, FLAT = 50, 1e-10  # of Newton's method, and the slope where it ends


@dataclass(frozen=True)
class Drafts:
    """N drafts that a student would make on texts. Each has figures (N,) that are known before its token is drawn.

    alpha: probability that the draft is accepted if all before it were. reach: probability that a round accepts all
    drafts before this one, if it starts at that position; weights by it give the drafts of real rounds. confidence:
    alpha as the head predicts it. states: alpha as the part of the head that reads only the state predicts it. entropy
    (nats), margin, top: figures of q as trained, see `measures`. depth: 0-based.
    """

    alpha: Tensor
    reach: Tensor
    confidence: Tensor
    states: Tensor
    entropy: Tensor
    margin: Tensor
    top: Tensor
    depth: Tensor

    def at(self, chosen: Tensor) -> "Drafts":
        return Drafts(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def __len__(self) -> int:
        return len(self.alpha)


def head_of(student: Student) -> ConfidenceHead | None:
    """Return the student's confidence head, or None if it has none."""
    head: ConfidenceHead | None = getattr(student.network, "confidence_head", None)
    return head


# --- the fit


def reserved(texts: Texts, depths: int) -> list[int]:
    """Return the rows of texts to fit a head on, at least one text and at most a tenth of the texts. Together they have
    about EVERY x DRAFTS drafts on sampled tokens. Raises UserError for fewer than two texts, since the draft would
    learn from none."""
    if len(texts) < 2:
        raise UserError(f"draft.confidence=true: it sets texts aside for the head, and there is {len(texts)} text to "
                        "learn from: sample at least 2, as by rollout.texts=10, or draft.confidence=null")  # fmt: skip
    drafts = int(texts.sampled.sum()) * depths / len(texts)
    return texts.evenly(max(min(math.ceil(EVERY * DRAFTS / max(drafts, 1)), len(texts) // 10), 1))


def fit(held: HeldOut, student: Student, head_target: Head, greedy: bool = False) -> int:
    """Fit the student's confidence head to its drafts on texts, and return the number of drafts. greedy: the draft's
    likeliest tokens are drafted. Raises ValueError for a student without such a head."""
    head = head_of(student)
    if head is None:
        raise ValueError(f"{type(student.network).__name__} has no confidence head: set draft.confidence=true")
    drafts = int(held.texts.sampled.sum()) * getattr(student.network.config, "depths", 1)
    every = min(max(drafts // DRAFTS, 1), EVERY)
    parts = [(read, drafts.alpha) for read, drafts in _drafts(held, student, head_target, greedy, every=every)]
    read, alpha = (torch.cat(side) for side in zip(*parts, strict=True))
    for by in (head.proj, head.with_q):
        weight, bias = logistic(read[:, : by.in_features].double(), alpha.double())
        with torch.no_grad():
            by.weight.copy_(weight.unsqueeze(0))
            by.bias.fill_(float(bias))
    return len(alpha)


def logistic(x: Tensor, y: Tensor, ridge: float = RIDGE) -> tuple[Tensor, Tensor]:
    """Return weights w (D,) and a bias b () of a logistic regression. They minimise the mean cross-entropy of sigmoid(x
    w + b) with labels y in [0, 1], plus ridge / 2 times the sum of the squares of w times the standard deviations of x.
    x (N, D), y (N,), in float64.

    Newton's method with halved steps finds the minimum, because the objective is convex.
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
    """Return figures of the student's confidence head on texts that neither the draft nor the head learnt from, see
    `figures`. If there are several depths, `by_depth` has the figures of each. read: a function that is called with the
    number of texts of each batch."""
    parts = [drafts for _, drafts in _drafts(held, student, head_target, greedy, read)]
    drafts = Drafts(*(torch.cat([getattr(part, field.name) for part in parts]).cpu() for field in fields(Drafts)))
    depths = [] if int(drafts.depth.max()) == ANY else range(int(drafts.depth.max()) + 1)
    by_depth = [figures(drafts.at(drafts.depth == depth)) for depth in depths]
    return {"temperature": held.temperature, "bins": BINS, "all": figures(drafts),
            "reliability": reliability(drafts.confidence, drafts.alpha), "by_depth": by_depth}  # fmt: skip


def figures(drafts: Drafts) -> dict[str, Any]:
    """Return the number of drafts, the means of alpha and of the confidence, and the expected calibration error. Return
    also areas under the ROC curve of "accepted" by score.

    The scores are the confidence, the prediction by the state alone, the draft's entropy, margin and top probability,
    and alpha itself, which no score exceeds. in_rounds: error and areas with each draft weighted by its `reach`.
    """
    scores = {"confidence": drafts.confidence, "states": drafts.states, "entropy": -drafts.entropy,
              "margin": drafts.margin, "top": drafts.top, "oracle": drafts.alpha}  # fmt: skip

    def weighted(weight: Tensor | None) -> dict[str, Any]:
        return {
            "calibration_error": calibration_error(drafts.confidence, drafts.alpha, weight),
            "area": {name: area(score, drafts.alpha, weight) for name, score in scores.items()},
        }

    means = {name: float(getattr(drafts, name).double().mean()) for name in ("alpha", "confidence")}
    return {"drafts": len(drafts), **means, **weighted(None), "in_rounds": weighted(drafts.reach)}


def reliability(
    confidence: Tensor, alpha: Tensor, weight: Tensor | None = None, bins: int = BINS
) -> list[dict[str, float]]:
    """Return for each bin of equal mass, in order of confidence, its mass in drafts, its mean confidence and its mean
    alpha. weight (N,): the weight of each draft; None means 1."""
    order = confidence.argsort(stable=True)
    mass = torch.ones(len(order), dtype=torch.float64) if weight is None else weight[order].double()
    at = ((mass.cumsum(0) - mass / 2) / mass.sum() * bins).long().clamp(max=bins - 1)
    sums = torch.stack([mass, mass * confidence[order].double(), mass * alpha[order].double()], 1)
    table = torch.zeros(bins, 3, dtype=torch.float64).index_add(0, at, sums).tolist()
    return [{"drafts": drafts, "confidence": sure / drafts, "alpha": accepted / drafts}
            for drafts, sure, accepted in table if drafts]  # fmt: skip


def calibration_error(confidence: Tensor, alpha: Tensor, weight: Tensor | None = None, bins: int = BINS) -> float:
    """Return the expected calibration error: |mean confidence - mean alpha| of bins of equal mass, averaged over drafts
    (Nguyen and O'Connor 2015, 1508.05154). Labels are exact acceptances, without sampling noise. The arguments are
    those of `reliability`."""
    table = reliability(confidence, alpha, weight, bins)
    gaps = sum(one["drafts"] * abs(one["confidence"] - one["alpha"]) for one in table)
    return gaps / (sum(one["drafts"] for one in table) or 1.0)


def area(score: Tensor, alpha: Tensor, weight: Tensor | None = None) -> float | None:
    """Return the area under the ROC curve: the probability that an accepted draft has a higher score than a rejected
    one. Ties count half. Each draft is accepted with weight alpha and rejected with weight 1 - alpha, times `weight`,
    so the area is exact and no acceptance is sampled. Return None if all drafts are accepted, or if all are rejected.
    """
    order = score.argsort(stable=True)
    likely = alpha[order].double()
    mass = torch.ones_like(likely) if weight is None else weight[order].double()
    _, group = score[order].unique_consecutive(return_inverse=True)
    accepted, rejected = (likely.new_zeros(len(score)).index_add(0, group, mass * share)
                          for share in (likely, 1 - likely))  # fmt: skip
    pairs = accepted.sum() * rejected.sum()
    if not float(pairs) > 0:
        return None
    return float((accepted * (rejected.cumsum(0) - rejected / 2)).sum() / pairs)


def line(figures: dict[str, Any]) -> str:
    """Return one line with the calibration error and the areas."""
    of = figures["all"]
    areas = ", ".join(f"{name} {value:.3f}" for name, value in of["area"].items() if value is not None)
    return (f"confidence head at T {figures['temperature']:g}: calibration error {of['calibration_error']:.3f} on "
            f"{of['drafts']} held-out drafts ({of['in_rounds']['calibration_error']:.3f} as rounds reach them); area "
            f"under the ROC curve: {areas}")  # fmt: skip


@torch.no_grad()
def _drafts(
    held: HeldOut, student: Student, head_target: Head, greedy: bool = False,
    read: Callable[[int], None] | None = None, every: int = 1, batch: int = 16,
) -> Iterator[tuple[Tensor, Drafts]]:  # fmt: skip
    """Yield chunks of the drafts of all depths on the texts' sampled tokens, each with the inputs of the head (n, D).
    read: a function that is called after each batch of texts with their number. every: only one in `every` rounds is
    read."""
    head = head_of(student)
    assert head is not None
    for rows in torch.arange(len(held.texts)).split(batch):
        guesses, record = guessed(held, rows, student)
        following = held.texts.ids[rows].roll(-1, 1).flatten().to(student.network.device)
        inside = pad(held.texts.predicted[rows], (0, 1)).flatten().to(following.device)
        reach = inside.double()  # by the position of a round's first draft: rounds start at sampled tokens
        for guess in guesses:
            first = guess.at - max(guess.depth, 0)
            after = torch.zeros_like(reach)
            for i in (inside[guess.at] & (first % every == 0)).nonzero().squeeze(-1).split(CHUNK):
                at, states = guess.at[i], guess.states[i]
                t = torch.full((len(i),), held.temperature, device=states.device)
                logp = served(log_probs(head_target(record[LAST].flatten(0, 1)[at]), t), t, held.truncate)
                plain = log_probs(guess.head(states), t)
                logq = one_hot(plain.argmax(-1), plain).log() if greedy else served(plain, t, held.truncate)
                token = following[at].unsqueeze(1)
                passes = l_from(logp.gather(1, token), logq.gather(1, token)).clamp(max=0).exp()[:, 0]
                after[first[i]] = reach[first[i]] * passes
                four = measures(plain)
                seen = states[:, : head.width]
                yield torch.cat((seen, four.to(seen)), 1), Drafts(
                    losses.alpha(logp, logq), reach[first[i]], head(seen, plain), head(seen), four[:, 0], four[:, 3],
                    four[:, 1], torch.full((len(i),), guess.depth),
                )  # fmt: skip
            reach = after
        if read:
            read(len(rows))
