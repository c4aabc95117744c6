"""Acceptance on held-out texts that the target sampled, by domain and by depth, and the tau that follows from it.

All figures come from one teacher-forced pass. They are unbiased only for texts that were sampled in the same regime. N
texts, T tokens of the longest text, L sampled tokens of the longest, K depths, D width, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from cotrain.acceptance import expected_calls, l_from, tau
from cotrain.console import Counter
from cotrain.data.texts import Texts
from cotrain.losses.chunked import CHUNK, Comparison, TargetDistributions, Truncate, compared
from cotrain.losses.guess import draftable
from cotrain.students.base import ANY, LAST, Guess, Student
from cotrain.teacher.target_distributions import FromStates, remembered
from cotrain.teacher.target_model import Head, Reader, Record, Seen
from inference.verify import predict_chain

DEPTHS = 8  # tau(k) and acceptance by position for k = 1..8
BINS = 15  # of the confidence, for the calibration error


@dataclass
class HeldOut:
    """Held-out texts in one regime, with the target's states, which are the same for every draft.

    states: layer -> (N, T, D). temperature: the regime's. truncate: a function that sets the logits cut by the regime's
    top-k / top-p to -inf, (n, V) -> (n, V); None without a cut.
    """

    texts: Texts
    states: Record
    temperature: float
    truncate: Truncate | None = None

    def at(self, rows: Tensor, device: torch.device) -> Record:
        """Return the target's states for some texts, as layer -> (n, T, D), on a device. rows (n,): indices of the
        texts."""
        return {layer: states[rows].to(device) for layer, states in self.states.items()}

    def spread(self, count: int) -> "HeldOut":
        """Return `count` texts, evenly spaced within each domain, or all if there are fewer. Each domain has its share
        of the count."""
        rows = self.texts.evenly(count)
        states = self.at(torch.tensor(rows), self.states[LAST].device)
        return HeldOut(self.texts.rows(rows), states, self.temperature, self.truncate)

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def hidden(self) -> Tensor:
        """Return the target's last states (N, T-1, D): entry t predicts token t+1 of a text."""
        return self.states[LAST][:, :-1]


@dataclass
class Scores:
    """Figures for N texts of at most L sampled tokens. Means are over all sampled tokens.

    l (N, L): log q - log p of each sampled token; 0 past a text's length.
    r_greedy (N, L): 1 if the token is the draft's most probable one, else 0. This is its acceptance in greedy drafting.
    confidence (N, L): the draft's probability of its most probable token.
    lengths (N,): the number of sampled tokens per text. alpha, alpha_greedy = p(argmax q), kl and entropy of q (nats):
    means.

    If the draft's distribution depends on the depth, l, r_greedy and confidence are (N, L, K): entry [i, t, j] is for
    token t as draft j (0-based) of a round that begins j tokens earlier. The means are then for the first drafted token
    of a round. alphas: the mean alpha at each of the K depths, NaN at a depth for which no text is long enough; () if
    the distribution does not depend on the depth.
    """

    l: Tensor
    r_greedy: Tensor
    confidence: Tensor
    lengths: Tensor
    alpha: float
    alpha_greedy: float
    kl: float
    entropy: float  # of q, in nats
    alphas: tuple[float, ...] = ()

    @property
    def r(self) -> Tensor:
        """Return the acceptance min(1, q / p) of each sampled token, (N, L) or (N, L, K); 0 past a text's length."""
        return self.l.clamp(max=0).exp() * self.inside.view(self.inside.shape + (1,) * (self.l.ndim - 2))

    @property
    def inside(self) -> Tensor:
        """Return (N, L) bool: True in the columns before each text's length."""
        return torch.arange(self.l.shape[1]) < self.lengths.unsqueeze(1)

    def drafted(self, k: int) -> int:
        """Return how many tokens a round drafts at draft length k: k, or the number of the draft's depths if this is
        smaller."""
        return k if self.l.ndim == 2 else min(k, self.l.shape[2])

    def calls(self, k: int) -> Tensor:
        """Return the expected number of target calls for each text (N,) at draft length k, under the token rule."""
        return expected_calls(self.r, self.drafted(k), self.lengths)

    def tau(self, k: int, verify: str = "token") -> float:
        """Return tokens per target call at draft length k. verify: the rule; every rule other than `block` counts as
        the token rule."""
        if verify == "block":
            reach = predict_chain.reach_block(self.l, self.drafted(k), self.lengths)
            return float(predict_chain.tau_from(reach, self.lengths))
        return float(tau(self.r, self.drafted(k), self.lengths))

    def accepted(self, k: int) -> tuple[list[float], list[float]]:
        """Return two lists of k values, for depths 1 .. k: the prefix acceptance, P(the first i drafts are accepted),
        and the conditional acceptance, P(draft i is accepted if all before it are)."""
        prefix, conditional = predict_chain.depths_from(predict_chain.reach(self.r, k, self.lengths), k, self.lengths)
        return prefix.tolist(), conditional.tolist()

    def tau_greedy(self, k: int) -> float:
        """Return tokens per target call at draft length k for greedy drafting. q is then one-hot, and all rules accept
        the same tokens."""
        return float(tau(self.r_greedy, self.drafted(k), self.lengths))

    @property
    def calibration(self) -> float:
        """Return the expected calibration error of the first drafted token, how far its probability under the draft
        differs from the rate at which it is the text's token: the sum over `BINS` bins of equal width of (share of
        tokens in the bin) * |mean confidence - mean hit| (Guo et al. 2017, 1706.04599); 0 without tokens."""
        first = (one if one.ndim == 2 else one[..., 0] for one in (self.confidence, self.r_greedy))
        sure, hit = (one[self.inside] for one in first)
        at = (sure * BINS).long().clamp(max=BINS - 1)
        gaps = torch.zeros(BINS, dtype=torch.float64).index_add_(0, at, (sure - hit).double())
        return float(gaps.abs().sum() / max(len(at), 1))


@torch.no_grad()
def held_out(
    read_target: Reader, texts: Texts, temperature: float, truncate: Truncate | None = None, batch: int = 16
) -> HeldOut:
    """Return the texts with the target's states, which all later evaluations share.

    read_target: a function ids (B, T) -> states (B, T, D) by layer. temperature, truncate: the regime; truncate sets
    the logits cut by top-k / top-p to -inf, None without a cut. batch: texts per pass.
    """
    records = [read_target(*texts.read(part)) for part in torch.arange(len(texts)).split(batch)]
    states = {layer: torch.cat([record[layer].cpu() for record in records]) for layer in records[0]}
    return HeldOut(texts, states, temperature, truncate)


def evaluate(held: HeldOut, student: Student, head_target: Head, scored: Counter | None = None) -> dict[str, Scores]:
    """Return the draft's scores on held-out texts, keyed by domain in alphabetical order, and last those of all texts
    together, under "all". head_target: the target's head, states (n, D) -> logits (n, V). scored: a function that is
    called after each batch with its number of texts."""
    domains = sorted(set(held.texts.domain))
    scores = {domain: score(held, domain, student, head_target, scored=scored) for domain in domains}
    return scores | {"all": _pooled(list(scores.values()))}


def guessed(held: HeldOut, rows: Tensor, student: Student) -> tuple[list[Guess], Record]:
    """Return a student's guesses on some texts, and the target's states (n, T, D) for these texts, by layer, on the
    student's device. rows (n,): indices of the texts."""
    device = student.network.device
    names = "ids", "position_ids", "source", "length"
    batch = {name: value for name, value in zip(names, held.texts.read(rows), strict=True) if value is not None}
    batch["temperature"] = torch.full((len(rows),), held.temperature)
    record = held.at(rows, device)
    return student.guesses(batch, Seen(record)), record


def figures(by_domain: dict[str, Scores]) -> dict[str, float]:
    """Return all figures by name: `quantity/domain`, or `quantity/domain/i` for depth i or draft length i (both
    1-based). by_domain: the scores by domain, and of all texts under "all".

    Quantities over all positions: alpha, alpha_greedy_draft = p(argmax q), kl, entropy of q, calibration_error. By
    draft length 1 .. 8: tau under the token rule, tau_block under block verification, tau_greedy_draft for greedy
    drafting. By depth 1 .. 8: conditional and prefix acceptance. alpha/worst is the alpha of the domain with the
    smallest one. If the draft's distribution depends on the depth, the draft's number of depths replaces 8, and
    alpha_by_depth is added.
    """
    alone = [scores.alpha for domain, scores in by_domain.items() if domain != "all"] or [by_domain["all"].alpha]
    named: dict[str, float] = {"alpha/worst": min(alone)}
    for domain, scores in by_domain.items():
        named |= {
            f"alpha/{domain}": scores.alpha,
            f"alpha_greedy_draft/{domain}": scores.alpha_greedy,
            f"kl/{domain}": scores.kl,
            f"entropy/{domain}": scores.entropy,
            f"calibration_error/{domain}": scores.calibration,
        }
        for name, values in by_depth(scores).items():
            named |= {f"{name}/{domain}/{depth}": value for depth, value in enumerate(values, 1)}
    return named


def by_depth(scores: Scores) -> dict[str, list[float]]:
    """Return figures by name, each a list over k = 1 .. 8, or up to the draft's number of depths. They are tau at draft
    length k under the token rule, under block verification and for greedy drafting, and conditional and prefix
    acceptance at depth k. If the draft's distribution depends on the depth, alpha_by_depth is added."""
    most = scores.drafted(DEPTHS)
    prefix, conditional = scores.accepted(most)
    depths, alphas = range(1, most + 1), {"alpha_by_depth": list(scores.alphas)} if scores.alphas else {}
    return alphas | {
        "tau": [scores.tau(k) for k in depths],
        "tau_block": [scores.tau(k, "block") for k in depths],
        "tau_greedy_draft": [scores.tau_greedy(k) for k in depths],
        "conditional": conditional,
        "prefix": prefix,
    }


@torch.no_grad()
def score(
    held: HeldOut,
    domain: str,
    student: Student,
    head_target: Head,
    batch: int = 16,
    scored: Counter | None = None,
) -> Scores:
    """Return the scores of one domain's texts, from one teacher-forced pass of the draft. head_target: states (n, D) ->
    logits (n, V). batch: texts per pass. scored: a function that is called after each batch with its number of texts.
    """
    rows = torch.tensor([i for i, name in enumerate(held.texts.domain) if name == domain])
    parts = []
    for at in rows.split(batch):
        parts.append(_compared(held, at, student, head_target))
        if scored:
            scored(len(at))
    first, length = held.texts.prompt[rows], held.texts.length[rows]
    l, r_greedy, confidence = (
        _aligned(torch.cat(one), first - 1) for one in zip(*(grids for grids, _ in parts), strict=True)
    )
    sums = torch.stack([sums for _, sums in parts]).sum(0)  # (depths, 4)
    lengths = length - first
    alpha, greedy, kl, entropy = (sums[0] / lengths.sum()).tolist()
    alphas = tuple((sums[:, 0] / drafts_by_depth(lengths, len(sums))).tolist()) if l.ndim == 3 else ()
    return Scores(l, r_greedy, confidence, lengths, alpha, greedy, kl, entropy, alphas)


def drafts_by_depth(lengths: Tensor, depths: int) -> Tensor:
    """Return (depths,): entry j is the number of tokens that a round can draft at depth j (0-based), summed over texts
    of lengths (N,): all tokens of a text except its first j."""
    return (lengths.unsqueeze(1) - torch.arange(depths)).clamp(min=0).sum(0)


def _compared(held: HeldOut, at: Tensor, student: Student, head_target: Head) -> tuple[list[Tensor], Tensor]:
    """Compare draft and target on the texts with indices `at` (B,).

    Return a list of three tensors, (B, T) each, or (B, T, K) if the draft's distribution depends on the depth: l,
    whether the token is the draft's most probable one, and max q. Entry t is for token t+1. Return also (K, 4), (1, 4)
    without depths: the sums of alpha, p(argmax q), KL and entropy at each depth.
    """
    guesses, record = guessed(held, at, student)
    ids = held.texts.ids[at].to(student.network.device)
    mask = pad(held.texts.predicted[at], (0, 1))
    following = ids.roll(-1, 1)
    target: TargetDistributions = FromStates(record[LAST], head_target)
    options: dict[str, Any] = {"temperature": held.temperature, "truncate": held.truncate}
    if len(guesses) > 1:
        target = remembered(target, guesses, mask, **options, chunk=CHUNK)
    comparisons = [compared(target, guess, following, draftable(mask, guess.depth), **options) for guess in guesses]
    grids = [[_placed(values, one.at, mask, never) for values, never in _of_tokens(one)] for one in comparisons]
    parts = [(one.alpha, one.alpha_greedy, one.kl, one.entropy) for one in comparisons]
    sums = torch.stack([torch.stack([part.double().sum() for part in of_depth]) for of_depth in parts])
    depths = map(list, zip(*grids, strict=True))  # for each figure, one tensor a depth
    by_depth = [one[0] if guesses[0].depth == ANY else torch.stack(one, -1) for one in depths]
    return by_depth, sums.cpu()


def _of_tokens(comparison: Comparison) -> list[tuple[Tensor, float]]:
    """Return l, hit and confidence of a comparison, each with the value to use at positions without a guess, where
    nothing is drafted.

    A token at the edge of a cut, with p(x) = 0 < q(x), counts as accepted, as if p = q. An infinite l would make sums
    undefined.
    """
    l = l_from(comparison.logp, comparison.logq)
    return [(l.masked_fill(l == torch.inf, 0.0), -torch.inf), (comparison.hit, 0.0), (comparison.confidence, 0.0)]


def _placed(values: Tensor, at: Tensor, mask: Tensor, never: float) -> Tensor:
    """Return a grid (B, T) on the CPU: the `values` (n,) at the flat positions `at` (n,), `never` at all other
    positions where `mask` (B, T) bool is True, and 0 elsewhere."""
    values = values.cpu()
    return values.new_zeros(mask.shape).masked_fill(mask, never).flatten().index_copy(0, at, values).view(mask.shape)


def _aligned(r: Tensor, start: Tensor) -> Tensor:
    """Return r, (N, T) or (N, T, K), with each row shifted left so that its first sampled token is in column 0, as (N,
    T-1) or (N, T-1, K): the last position predicts no token. Values past a row's length have no meaning. start (N,):
    the position that predicts each row's first sampled token."""
    columns = torch.arange(r.shape[1] - 1) + start.unsqueeze(1)
    return r.take_along_dim(columns.clamp(max=r.shape[1] - 1).view(columns.shape + (1,) * (r.ndim - 2)), 1)


def _pooled(parts: list[Scores]) -> Scores:
    """Return one set of scores for the texts of all domains."""
    tokens = torch.tensor([float(part.lengths.sum()) for part in parts])
    weights = tokens / tokens.sum()
    width = max(part.l.shape[1] for part in parts)

    def joined(rs: list[Tensor]) -> Tensor:
        return torch.cat([pad(r, (0, 0) * (r.ndim - 2) + (0, width - r.shape[1])) for r in rs])

    means = [[part.alpha, part.alpha_greedy, part.kl, part.entropy] for part in parts]
    tensors = ([getattr(part, name) for part in parts] for name in ("l", "r_greedy", "confidence"))
    lengths = torch.cat([part.lengths for part in parts])
    l, r_greedy, confidence = map(joined, tensors)
    alpha, greedy, kl, entropy = (torch.tensor(means) * weights.unsqueeze(1)).sum(0).tolist()
    counts = torch.stack([drafts_by_depth(part.lengths, len(part.alphas)) for part in parts])
    sums = (torch.tensor([part.alphas for part in parts]) * counts).nansum(0)  # NaN where no round drafts
    return Scores(l, r_greedy, confidence, lengths, alpha, greedy, kl, entropy, tuple((sums / counts.sum(0)).tolist()))
