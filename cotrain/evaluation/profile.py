"""Acceptance by the draft's temperature and by the length of the context, and a test whether the target sampled given
texts.

N tokens in all texts, n positions of a chunk, D width, V vocabulary.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cotrain.console import Counter
from cotrain.evaluation.held_out import HeldOut, guessed
from cotrain.losses import divergences
from cotrain.losses.chunked import CHUNK, log_probs, served_logs
from cotrain.losses.guess import chosen, numbers, picked
from cotrain.students.base import LAST, Guess, Student
from cotrain.teacher.target_model import Head
from inference.sampling import at_ids

IMPOSSIBLE, SIGMAS = 0.02, 6.0  # generous limits: kernels differ a little between machines
TIED = 4  # in units of the highest logit's rounding: nearly all differences of two bfloat16 passes are smaller
DRAFTING = (0.0, 0.3, 0.5, 0.7, 0.85, 1.0, 1.2)


@torch.no_grad()
def profile(
    held: HeldOut,
    student: Student,
    head_target: Head,
    read: Counter | None = None,
    drafting: Sequence[float] = DRAFTING,
) -> dict[str, Any]:
    """Return alpha = sum_v min(p, q) on held-out texts of one target temperature, in two ways. `by_draft_temperature`:
    keyed by the draft's temperature as text (at "0" the draft is one-hot at its most probable token). `by_context`:
    keyed by the number of tokens of context, as ranges that double in length ("4-7"); here the draft has the target's
    temperature.

    Verification is exact at any temperature of the draft; only acceptance changes. If the draft's distribution depends
    on the depth, the figures are for the first drafted token of a round.

    head_target: states (n, D) -> logits (n, V). read: a function that is called after each batch with its number of
    texts. drafting: the draft's temperatures; the target's is added.
    """
    temperatures = sorted({*drafting, held.temperature})
    totals = torch.zeros(len(temperatures), dtype=torch.float64)
    buckets: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for theirs, guess, context, _ in positions(held, student, read):
        p = served_log_probs(head_target(theirs), held.temperature, held)
        logits = guess.head(guess.states)
        alphas = (
            torch.stack([divergences.alpha(p, served_log_probs(logits, t, held)) for t in temperatures]).double().cpu()
        )
        totals += alphas.sum(1)
        own = alphas[temperatures.index(held.temperature)]
        for length, alpha in zip(context.tolist(), own.tolist(), strict=True):
            bucket = buckets[int(length).bit_length()]
            bucket[0], bucket[1] = bucket[0] + alpha, bucket[1] + 1
    means = (totals / max(sum(positions for _, positions in buckets.values()), 1)).tolist()
    return {
        "by_draft_temperature": {f"{t:g}": alpha for t, alpha in zip(temperatures, means, strict=True)},
        "by_context": {
            f"{2 ** (bits - 1)}-{2**bits - 1}": total / number for bits, (total, number) in sorted(buckets.items())
        },
    }


def served_log_probs(logits: Tensor, temperature: float, held: HeldOut) -> Tensor:
    """Return log-probabilities (n, V) as the engine serves them: at a temperature (0: one-hot), with the top-k / top-p
    cut of the texts `held`. logits (n, V)."""
    t = torch.full((len(logits),), temperature, device=logits.device)
    return served_logs(log_probs(logits, t), t, held.truncate)


def positions(
    held: HeldOut, student: Student, read: Counter | None = None, batch: int = 16
) -> Iterator[tuple[Tensor, Guess, Tensor, Tensor]]:
    """Yield chunks of n positions that predict sampled tokens: the target's states (n, D), the student's guess there
    for the first depth, the number of tokens up to and including each position (n,), and the index of each position's
    text (n,).

    read: a function that is called after each batch with its number of texts. batch: texts per pass.
    """
    for rows in torch.arange(len(held.texts)).split(batch):
        (guess, *_), record = guessed(held, rows, student)
        inside = torch.nn.functional.pad(held.texts.predicted[rows], (0, 1))
        context = torch.arange(1, inside.shape[1] + 1).expand_as(inside).flatten()
        for i in numbers(chosen(inside, guess.at)).split(CHUNK):
            at = guess.at[i]
            part = Guess(guess.depth, at, picked(guess.states, i), guess.head)
            yield chosen(record[LAST], at), part, context[at], rows[at // inside.shape[1]]
        if read:
            read(len(rows))


def profile_line(temperature: float, profile: dict[str, Any]) -> str:
    """Return a line for the user: acceptance with the draft at the target's temperature, with the draft at its best
    temperature, and at the shortest and the longest contexts. temperature: the target's. profile: from the function
    `profile`."""
    by, contexts = profile["by_draft_temperature"], list(profile["by_context"].items())
    best = max(by, key=by.__getitem__)
    own = by[f"{temperature:g}"]
    ends = ", ".join(f"{alpha:.3f} at {span}" for span, alpha in [*contexts[:1], *contexts[-1:]])
    drafted = f"acceptance {own:.3f} with the draft at the same one, {by[best]:.3f} with the draft at {best}, the best"
    return f"target at temperature {temperature:g}: {drafted}; by tokens of context {ends}"


@dataclass(frozen=True)
class Provenance:
    """Evidence on whether the target sampled given texts.

    tokens: their number. surprise: the mean of -log p(x), in nats. entropy: the mean entropy of p, in nats; it is the
    expected surprise if x was drawn from p. z: the difference of the two, divided by its standard deviation.
    impossible: the share of tokens with p(x) = 0, which the means leave out.
    """

    tokens: int
    surprise: float
    entropy: float
    z: float
    impossible: float

    @property
    def own(self) -> bool:
        """Return whether the texts look as if the target sampled them."""
        return abs(self.z) < SIGMAS and self.impossible < IMPOSSIBLE

    def line(self) -> str:
        return (
            f"their mean -log p under the target is {self.surprise:.2f} nats per token; for texts of the target it "
            f"would be {self.entropy:.2f} (z = {self.z:+.0f}, {self.tokens} tokens, {100 * self.impossible:.1f} % "
            "with p = 0)"
        )


@torch.no_grad()
def provenance(held: HeldOut, head: Head, device: torch.device | str = "cpu") -> Provenance:
    """Return the evidence on whether the target sampled the texts in their regime: the mean of -log p(x), and the mean
    entropy of p. head: the target's head, on `device`.

    If x was drawn from p, then -log p(x) - H(p) has mean 0 and variance sum_v p log^2 p - H^2, given the text before.
    These differences are uncorrelated, so z is approximately standard normal.
    """
    parts = []
    for at in torch.arange(len(held.texts)).split(16):
        inside, x = held.texts.predicted[at], held.texts.ids[at, 1:]
        chunks = zip(held.hidden[at][inside].split(CHUNK), x[inside].split(CHUNK), strict=True)
        parts += [_moments(head(states.to(device)), x, held).double().cpu() for states, x in chunks]
    tokens = torch.cat(parts)  # (N, 3)
    possible = tokens[:, 0].isfinite()
    sums, count = tokens[possible].sum(0), max(int(possible.sum()), 1)
    spread = math.sqrt(max(float(sums[2]), 0.0))
    z = float(sums[0] - sums[1]) / spread if spread else 0.0
    return Provenance(
        len(tokens), float(sums[0]) / count, float(sums[1]) / count, z, 1 - float(possible.double().mean())
    )


def _moments(logits: Tensor, x: Tensor, held: HeldOut) -> Tensor:
    """Return (n, 3): -log p(x), the entropy H(p), and the variance of -log p under p, in nats. logits (n, V): the
    target's. x (n,): the text's token at each position. held: gives the regime.

    At temperature 0, a token whose logit is within rounding of the highest counts as the most probable one (surprise
    0), because another pass may choose either. Any other token gives an infinite surprise.
    """
    x = x.to(logits.device)
    if held.temperature == 0:
        rounding = TIED * torch.finfo(held.states[LAST].dtype).eps * logits.amax(-1).abs()
        surprise = torch.where(logits.amax(-1) - at_ids(logits, x) <= rounding, 0.0, math.inf)
        return torch.stack([surprise, torch.zeros_like(surprise), torch.zeros_like(surprise)], -1)
    logs = served_log_probs(logits, held.temperature, held)
    entropy = divergences.entropy(logs)
    square = (logs.exp() * logs.masked_fill(logs == -math.inf, 0.0).square()).sum(-1)
    return torch.stack([-at_ids(logs, x), entropy, square - entropy.square()], -1)
