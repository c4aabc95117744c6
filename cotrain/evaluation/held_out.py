"""Acceptance on held-out text that the target sampled: what is accepted, where, and what it is worth.

All figures of MATH section 4 come from one teacher-forced pass: they are unbiased on text sampled in the regime
that they speak of, and on no other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cotrain.acceptance import conditional, l_from, prefix, tau, tau_block
from cotrain.losses.chunked import Truncate, compared
from cotrain.rollout.kept_texts import Texts

DEPTHS = 8  # tau(k) and acceptance by position for k = 1..8
Head = Callable[[Tensor], Tensor]
Read = Callable[..., Tensor]  # ids (B, T), position_ids (B, T) or None -> hidden states (B, T, D)


@dataclass
class HeldOut:
    """Texts of one regime with the target's hidden states (N, T, D), which no draft changes."""

    texts: Texts
    hidden: Tensor
    temperature: float
    truncate: Truncate | None = None


@dataclass
class Scores:
    """l (N, L): log q - log p of each sampled token, 0 past a row's length; r_greedy, acceptance where the draft's
    likeliest token is drafted; confidence (N, L): of the draft in its likeliest token; lengths (N,); means over all
    tokens."""

    l: Tensor
    r_greedy: Tensor
    confidence: Tensor
    lengths: Tensor
    alpha: float
    alpha_greedy: float
    kl: float
    entropy: float  # of q, in nats

    @property
    def r(self) -> Tensor:
        """(N, L): acceptance of each sampled token given that it was emitted, min(1, q / p); 0 past a row's length."""
        inside = torch.arange(self.l.shape[1]) < self.lengths.unsqueeze(1)
        return self.l.clamp(max=0).exp() * inside

    def tau(self, k: int, verify: str = "token") -> float:
        """Tokens per target call at draft length k under a rule of verification: of `block` its own, of any other the
        token rule's."""
        if verify == "block":
            return float(tau_block(self.l, k, self.lengths))
        return float(tau(self.r, k, self.lengths))

    def tau_greedy(self, k: int) -> float:
        """The same for greedy drafting. The law drafted from is certain: a token accepted by one rule is by all."""
        return float(tau(self.r_greedy, k, self.lengths))

    @property
    def calibration(self) -> float:
        inside = torch.arange(self.r.shape[1]) < self.lengths.unsqueeze(1)
        return calibration_error(self.confidence[inside], self.r_greedy[inside])


@torch.no_grad()
def held_out(
    read_target: Read, texts: Texts, temperature: float, truncate: Truncate | None = None, batch: int = 16
) -> HeldOut:
    """Read the target once over the texts."""
    rows = torch.arange(len(texts)).split(batch)
    hidden = torch.cat([read_target(*texts.read(part))[:, :-1].cpu() for part in rows])
    return HeldOut(texts, hidden, temperature, truncate)


def evaluate(held: HeldOut, read_draft: Read, head_draft: Head, head_target: Head) -> dict[str, Scores]:
    """Scores of each domain, in alphabetical order, and of all texts together under "all"."""
    domains = sorted(set(held.texts.domain))
    found = {domain: score(held, domain, read_draft, head_draft, head_target) for domain in domains}
    return found | {"all": _together(list(found.values()))}


def figures(found: dict[str, Scores]) -> dict[str, float]:
    """Named `quantity/domain` and, for depth i, `quantity/domain/i`.

    alpha, alpha_greedy_draft = p(argmax q), kl, entropy of q, calibration_error; tau at k = 1..8 by the token rule,
    tau_block by block verification, tau_greedy_draft for greedy drafting; conditional and prefix acceptance at depth
    1..8. alpha/worst: of the domain that is accepted least.
    """
    alone = [scores.alpha for domain, scores in found.items() if domain != "all"] or [found["all"].alpha]
    named: dict[str, float] = {"alpha/worst": min(alone)}
    for domain, scores in found.items():
        named[f"alpha/{domain}"] = scores.alpha
        named[f"alpha_greedy_draft/{domain}"] = scores.alpha_greedy
        named[f"kl/{domain}"] = scores.kl
        named[f"entropy/{domain}"] = scores.entropy
        named[f"calibration_error/{domain}"] = scores.calibration
        for name, values in by_depth(scores).items():
            named |= {f"{name}/{domain}/{depth}": value for depth, value in enumerate(values, 1)}
    return named


def by_depth(scores: Scores) -> dict[str, list[float]]:
    """tau(k) by token and block verification and of greedy drafting, conditional and prefix acceptance at depth k, for
    k = 1..8."""
    depths = range(1, DEPTHS + 1)
    return {
        "tau": [scores.tau(k) for k in depths],
        "tau_block": [scores.tau(k, "block") for k in depths],
        "tau_greedy_draft": [scores.tau_greedy(k) for k in depths],
        "conditional": conditional(scores.r, DEPTHS, scores.lengths).tolist(),
        "prefix": prefix(scores.r, DEPTHS, scores.lengths).tolist(),
    }


@torch.no_grad()
def score(held: HeldOut, domain: str, read_draft: Read, head_draft: Head, head_target: Head, batch: int = 16) -> Scores:
    """One teacher-forced pass of the draft over the texts of a domain."""
    rows = [i for i, name in enumerate(held.texts.domain) if name == domain]
    ratios: list[Tensor] = []
    hits: list[Tensor] = []
    sure: list[Tensor] = []
    means = torch.zeros(4, dtype=torch.float64)
    for at in torch.tensor(rows).split(batch):
        ours = read_draft(*held.texts.read(at))[:, :-1]
        parts = (held.texts.ids[at], held.hidden[at], held.texts.predicted[at])
        ids, theirs, predicted = (part.to(ours.device) for part in parts)
        options: dict[str, Any] = {"temperature": held.temperature, "truncate": held.truncate}
        found = compared(theirs, head_target, ours, head_draft, ids[:, 1:], predicted, **options)
        l = l_from(found.logp, found.logq)
        for kept, values in ((ratios, l), (hits, found.hit), (sure, found.confidence)):
            kept.append(values.new_zeros(predicted.shape).masked_scatter(predicted, values).cpu())
        summed = (found.alpha, found.alpha_greedy, found.kl, found.entropy)
        means += torch.stack([part.double().sum() for part in summed]).cpu()
    first, length = held.texts.prompt[rows], held.texts.length[rows]
    aligned = (_aligned(torch.cat(kept), first - 1) for kept in (ratios, hits, sure))
    l, r_greedy, confidence = aligned
    alpha, greedy, kl, entropy = (means / (length - first).sum()).tolist()
    return Scores(l, r_greedy, confidence, length - first, alpha, greedy, kl, entropy)


def calibration_error(confidence: Tensor, hit: Tensor, bins: int = 15) -> float:
    """Expected calibration error: sum over bins of confidence of their share times |mean confidence - mean hit| (Guo
    et al. 2017, 1706.04599). confidence in [0, 1], hit 0 or 1, (N,) each; 0 without any."""
    at = (confidence * bins).long().clamp(max=bins - 1)
    apart = torch.zeros(bins, dtype=torch.float64).index_add_(0, at, (confidence - hit).double())
    return float(apart.abs().sum() / max(len(at), 1))


def _aligned(r: Tensor, start: Tensor) -> Tensor:
    """Shift each row left so that column 0 is its first sampled token; what comes in is past its length."""
    columns = torch.arange(r.shape[1]) + start.unsqueeze(1)
    return r.gather(1, columns.clamp(max=r.shape[1] - 1))


def _together(parts: list[Scores]) -> Scores:
    tokens = torch.tensor([float(part.lengths.sum()) for part in parts])
    weights = tokens / tokens.sum()
    width = max(part.l.shape[1] for part in parts)

    def joined(rs: list[Tensor]) -> Tensor:
        return torch.cat([torch.nn.functional.pad(r, (0, width - r.shape[1])) for r in rs])

    means = [[part.alpha, part.alpha_greedy, part.kl, part.entropy] for part in parts]
    tensors = ([getattr(part, name) for part in parts] for name in ("l", "r_greedy", "confidence"))
    lengths = torch.cat([part.lengths for part in parts])
    l, r_greedy, confidence = map(joined, tensors)
    alpha, greedy, kl, entropy = (torch.tensor(means) * weights.unsqueeze(1)).sum(0).tolist()
    return Scores(l, r_greedy, confidence, lengths, alpha, greedy, kl, entropy)
