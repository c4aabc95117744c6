"""Where a draft is accepted: by the temperature it drafts at, and by the length of the context."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from cotrain import losses
from cotrain.evaluation.held_out import Head, HeldOut, Read
from cotrain.losses.chunked import CHUNK, log_law, served

DRAFTING = (0.0, 0.3, 0.5, 0.7, 0.85, 1.0, 1.2)


@torch.no_grad()
def profile(
    held: HeldOut, read_draft: Read, head_draft: Head, head_target: Head, drafting: Sequence[float] = DRAFTING
) -> dict[str, Any]:
    """alpha = sum_v min(p, q) over the held-out texts of one temperature of the target: by the temperature of the draft
    (0: its likeliest token), and, both at the target's, by the tokens of context, in buckets that double.

    Verification is exact whatever the draft's temperature is; acceptance alone depends on it.
    """
    temperatures = sorted({*drafting, held.temperature})
    totals = torch.zeros(len(temperatures), dtype=torch.float64)
    buckets: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for theirs, ours, context in positions(held, read_draft):
        p = law(head_target(theirs), held.temperature, held)
        logits = head_draft(ours)
        alphas = torch.stack([losses.alpha(p, law(logits, t, held)) for t in temperatures]).double().cpu()
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


def law(logits: Tensor, temperature: float, held: HeldOut) -> Tensor:
    """As it is served, log (n, V)."""
    t = torch.full((len(logits),), temperature, device=logits.device)
    return served(log_law(logits, t), t, held.truncate)


def positions(held: HeldOut, read_draft: Read, batch: int = 16) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Hidden states of target (n, D) and draft (n, D') that predict sampled tokens, and the tokens before each (n,)."""
    for at in torch.arange(len(held.texts)).split(batch):
        inside = held.texts.predicted[at]
        ours = read_draft(*held.texts.read(at))[:, :-1]
        theirs = held.hidden[at].to(ours.device)
        context = torch.arange(1, inside.shape[1] + 1).expand_as(inside)[inside]
        mask = inside.to(ours.device)
        yield from zip(theirs[mask].split(CHUNK), ours[mask].split(CHUNK), context.split(CHUNK), strict=True)


def line(temperature: float, found: dict[str, Any]) -> str:
    """One line: which draft temperature is accepted most, and how long contexts do."""
    by, contexts = found["by_draft_temperature"], list(found["by_context"].items())
    best = max(by, key=by.__getitem__)
    own = by[f"{temperature:g}"]
    ends = ", ".join(f"{alpha:.3f} at {span}" for span, alpha in (contexts[0], contexts[-1]))
    drafted = f"acceptance {own:.3f} drafting at that temperature, {by[best]:.3f} at {best}"
    return f"target at T {temperature:g}: {drafted}; by tokens of context {ends}"
