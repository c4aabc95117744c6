"""Acceptance by draft temperature and by length of context, and whether texts were sampled from the target."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cotrain import losses
from cotrain.evaluation.held_out import HeldOut, guessed
from cotrain.losses.chunked import CHUNK, log_probs, served
from cotrain.students.base import LAST, Guess, Student
from cotrain.teacher.target_model import Head

IMPOSSIBLE, SIGMAS = 0.02, 6.0  # generous limits: kernels differ a little between machines
TIED = 4  # times the rounding of the highest logit: nearly all differences between two bfloat16 passes are smaller
DRAFTING = (0.0, 0.3, 0.5, 0.7, 0.85, 1.0, 1.2)


@torch.no_grad()
def profile(
    held: HeldOut,
    student: Student,
    head_target: Head,
    read: Callable[[int], None] | None = None,
    drafting: Sequence[float] = DRAFTING,
) -> dict[str, Any]:
    """alpha = sum_v min(p, q) over the held-out texts of one temperature of the target: by the temperature of the draft
    (0: its likeliest token), and by the tokens of context, in buckets that double, with the draft at the target's
    temperature. read: see `positions`.

    Verification is exact at any temperature of the draft, which changes only acceptance. If the draft's distribution
    depends on the depth, both are of its first draft; for later ones see `held_out.by_depth`.
    """
    temperatures = sorted({*drafting, held.temperature})
    totals = torch.zeros(len(temperatures), dtype=torch.float64)
    buckets: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for theirs, guess, context, _ in positions(held, student, read):
        p = probs(head_target(theirs), held.temperature, held)
        logits = guess.head(guess.states)
        alphas = torch.stack([losses.alpha(p, probs(logits, t, held)) for t in temperatures]).double().cpu()
        totals += alphas.sum(1)
        own = alphas[temperatures.index(held.temperature)]
        for length, alpha in zip(context.tolist(), own.tolist(), strict=True):
            bucket = buckets[int(length).bit_length()]
            bucket[0], bucket[1] = bucket[0] + alpha, bucket[1] + 1
    count = sum(positions for _, positions in buckets.values())
    means = (totals / max(count, 1)).tolist()
    return {
        "by_draft_temperature": {f"{t:g}": alpha for t, alpha in zip(temperatures, means, strict=True)},
        "by_context": {f"{2 ** (bits - 1)}-{2**bits - 1}": total / number
                       for bits, (total, number) in sorted(buckets.items())},
    }  # fmt: skip


def probs(logits: Tensor, temperature: float, held: HeldOut) -> Tensor:
    """Log probabilities (n, V) as they are served."""
    t = torch.full((len(logits),), temperature, device=logits.device)
    return served(log_probs(logits, t), t, held.truncate)


def positions(
    held: HeldOut, student: Student, read: Callable[[int], None] | None = None, batch: int = 16
) -> Iterator[tuple[Tensor, Guess, Tensor, Tensor]]:
    """Chunks of the positions that predict sampled tokens: the target's states (n, D), the student's first guesses, the
    number of tokens before each (n,) and its text's row (n,). read: called after each batch of texts with their
    number."""
    for rows in torch.arange(len(held.texts)).split(batch):
        (guess, *_), record = guessed(held, rows, student)
        inside = torch.nn.functional.pad(held.texts.predicted[rows], (0, 1))
        context = torch.arange(1, inside.shape[1] + 1).expand_as(inside).flatten()
        for i in inside.flatten()[guess.at.cpu()].nonzero().squeeze(-1).to(guess.at.device).split(CHUNK):
            at = guess.at[i]
            part = Guess(guess.depth, at, guess.states[i], guess.head)
            yield record[LAST].flatten(0, 1)[at], part, context[at.cpu()], rows[at.cpu() // inside.shape[1]]
        if read:
            read(len(rows))


def line(temperature: float, profile: dict[str, Any]) -> str:
    """One line: the draft temperature with the highest acceptance, and acceptance at short and long contexts."""
    by, contexts = profile["by_draft_temperature"], list(profile["by_context"].items())
    best = max(by, key=by.__getitem__)
    own = by[f"{temperature:g}"]
    ends = ", ".join(f"{alpha:.3f} at {span}" for span, alpha in (contexts[0], contexts[-1]))
    drafted = f"acceptance {own:.3f} drafting at that temperature, {by[best]:.3f} at {best}"
    return f"target at T {temperature:g}: {drafted}; by tokens of context {ends}"


@dataclass(frozen=True)
class Provenance:
    """Over a number of tokens, in nats: surprise, the mean of -log p(x); entropy of p, which surprise has as its mean
    if p drew x; z: their difference over its standard deviation. impossible: share of tokens to which p gives no mass,
    left out of the means."""

    tokens: int
    surprise: float
    entropy: float
    z: float
    impossible: float

    @property
    def own(self) -> bool:
        """Whether the target may have sampled the texts."""
        return abs(self.z) < SIGMAS and self.impossible < IMPOSSIBLE

    def line(self) -> str:
        return (f"the target's surprise at them is {self.surprise:.2f} nats a token, at its own it would be "
                f"{self.entropy:.2f} (z = {self.z:+.0f}, {self.tokens} tokens, {100 * self.impossible:.1f} % of them "
                "impossible)")  # fmt: skip


@torch.no_grad()
def provenance(held: HeldOut, head: Head, device: torch.device | str = "cpu", batch: int = 16) -> Provenance:
    """Whether the target sampled texts in their regime: the mean of -log p(x) beside the entropy of p. head: of the
    target, on a device.

    Given the text before, -log p(x) - H(p) has mean 0 and variance sum_v p log^2 p - H^2 if p drew x, and such
    differences are uncorrelated: then z is about standard normal.
    """
    parts = []
    for at in torch.arange(len(held.texts)).split(batch):
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
    """-log p(x), H(p) and the variance of -log p under p, of logits (n, V) and tokens x (n,) -> (n, 3). At temperature
    0 a token within rounding of the highest logit counts as the highest: another pass may choose either. So texts of a
    temperature whose draws hardly ever differ by more than that pass for greedy ones."""
    if held.temperature == 0:
        rounding = TIED * torch.finfo(held.states[LAST].dtype).eps * logits.amax(-1).abs()
        gap = logits.amax(-1) - logits.gather(-1, x.to(logits.device)[:, None])[:, 0]
        surprise = torch.where(gap <= rounding, 0.0, math.inf)
        return torch.stack([surprise, torch.zeros_like(surprise), torch.zeros_like(surprise)], -1)
    t, x = torch.full((len(x),), held.temperature, device=logits.device), x.to(logits.device)
    logs = served(log_probs(logits, t), t, held.truncate)
    entropy = losses.entropy(logs)
    square = (logs.exp() * logs.masked_fill(logs == -math.inf, 0.0).square()).sum(-1)
    return torch.stack([-logs.gather(-1, x[:, None])[:, 0], entropy, square - entropy.square()], -1)
