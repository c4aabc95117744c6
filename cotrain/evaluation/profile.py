"""Where a draft is accepted: by the temperature it drafts at, and by the length of the context."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from cotrain import losses
from cotrain.evaluation.held_out import HeldOut, guessed
from cotrain.losses.chunked import CHUNK
from cotrain.losses.served_distributions import log_probs, served
from cotrain.students.base import LAST, Guess, Student
from cotrain.teacher.target_distributions import Head

DRAFTING = (0.0, 0.3, 0.5, 0.7, 0.85, 1.0, 1.2)


@torch.no_grad()
def profile(held: HeldOut, student: Student, head_target: Head, drafting: Sequence[float] = DRAFTING) -> dict[str, Any]:
    """alpha = sum_v min(p, q) over the held-out texts of one temperature of the target: by the temperature of the draft
    (0: its likeliest token), and, both at the target's, by the tokens of context, in buckets that double.

    Verification is exact whatever the draft's temperature is; acceptance alone depends on it. Of a draft whose
    distribution depends on the depth, both are of its first draft; acceptance by depth is `held_out.by_depth`'s.
    """
    temperatures = sorted({*drafting, held.temperature})
    totals = torch.zeros(len(temperatures), dtype=torch.float64)
    buckets: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for theirs, guess, context, _ in positions(held, student):
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
    """As it is served, log (n, V)."""
    t = torch.full((len(logits),), temperature, device=logits.device)
    return served(log_probs(logits, t), t, held.truncate)


def positions(held: HeldOut, student: Student, batch: int = 16) -> Iterator[tuple[Tensor, Guess, Tensor, Tensor]]:
    """Hidden states of the target (n, D) and first guesses n of the student that predict sampled tokens, the tokens
    before each (n,) and its text's number (n,)."""
    for rows in torch.arange(len(held.texts)).split(batch):
        (guess, *_), record = guessed(held, rows, student)
        inside = torch.nn.functional.pad(held.texts.predicted[rows], (0, 1))
        context = torch.arange(1, inside.shape[1] + 1).expand_as(inside).flatten()
        for i in inside.flatten()[guess.at.cpu()].nonzero().squeeze(-1).to(guess.at.device).split(CHUNK):
            at = guess.at[i]
            part = Guess(guess.depth, at, guess.states[i], guess.head)
            yield record[LAST].flatten(0, 1)[at], part, context[at.cpu()], rows[at.cpu() // inside.shape[1]]


def line(temperature: float, found: dict[str, Any]) -> str:
    """One line: which draft temperature is accepted most, and how long contexts do."""
    by, contexts = found["by_draft_temperature"], list(found["by_context"].items())
    best = max(by, key=by.__getitem__)
    own = by[f"{temperature:g}"]
    ends = ", ".join(f"{alpha:.3f} at {span}" for span, alpha in (contexts[0], contexts[-1]))
    drafted = f"acceptance {own:.3f} drafting at that temperature, {by[best]:.3f} at {best}"
    return f"target at T {temperature:g}: {drafted}; by tokens of context {ends}"
