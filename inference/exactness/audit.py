"""An audit: were texts sampled from the target? It needs the texts and the target's distributions on them, not the
sampler's code, seeds or passes, so any server can be audited.

p is the target's distribution at a token x, after the sampling settings and given the text before. If each x was drawn
from its p, each of these has a known distribution:

likelihood  the sum of -log p(x) - H(p) has mean 0 and a known variance: sharper or flatter texts
ranks       sum_{v before x} p_v + u p_x, with a uniform u, is uniform and independent from token to token. `before` is
            an order of the vocabulary: by p (likelier or less likely tokens are favoured), by q / p (drafts are
            favoured: refused drafts kept, residuals without the subtraction), or by id
favoured    with a draft: how many tokens have q > p, of which lenient tests keep too many
pairs       the product of successive ranks, centred: random numbers are reused
equal       texts of one prompt part by chance, at each token with probability 1 - sum p^2: seeds are reused
calls       with a server's counters: texts, draft and verification rule determine the expected number of target calls

Each is given as a standard score. Distributions that differ by rounding spread these scores more than 1, hence
`SPREAD`. At temperature 0 a token must be the likeliest, up to ties.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Tensor

from inference.exactness.likelihood import moments
from inference.exactness.teacher_forced import CELLS as LOGITS
from inference.exactness.teacher_forced import whole_texts
from inference.models.lm import LM
from inference.sampling import Sampling, at_ids, probs, wide

LEVEL = 1e-4  # probability of a false alarm, at most, from some `LEAST` tokens on
LEAST, BLUNT = 300, 0.1  # fewer tokens than this, or a power that sees only larger shifts: nothing is judged
SPREAD = 1.2  # of the scores of clean runs, whose distributions differ by rounding: 17 runs of vLLM and of this engine
SURE = 0.99  # probability with which the smallest shift is seen that an audit names
BINS, CELLS = 20, 4  # of ranks, and of either rank of a pair
TIE = 0.06  # the largest gap of two logits that bfloat16 explains, in root mean squares of the logits
ALLOWED = 0.002  # share of tokens that the settings cut away by a larger gap
ROUNDED = 0.005  # standard deviation of the calls by rounding, over the calls: vLLM's and llama.cpp's differ by .002
CALLS = "target calls"


class ServedText(NamedTuple):
    """n tokens of a text, or of a part of it. x (n,): index of each token among the V outcomes of its distribution.
    p (n, V): the target's probabilities of these outcomes. q (n, V): those of the draft, None if they are not known.
    gap (n,): how far the logit of a token of probability 0 is below the smallest that is not, in root mean squares of
    the logits; 0 for others; None if not known. named: how many of the outcomes, the first, are single tokens; None for
    all, which are the token ids in order. greedy: whether temperature is 0. start: index of the first in the text."""

    x: Tensor
    p: Tensor
    q: Tensor | None = None
    gap: Tensor | None = None
    named: int | None = None
    greedy: bool = False
    start: int = 0


@dataclass(frozen=True)
class ServedCalls:
    """Target calls of a server for its texts. counted: by the server. expected: their expectation given the texts, by
    the target, the draft and the rule. sigma: its standard deviation."""

    counted: int
    expected: float
    sigma: float

    @property
    def z(self) -> float:
        return (self.counted - self.expected) / math.hypot(self.sigma, ROUNDED * self.expected)


@dataclass(frozen=True)
class Audit:
    """The result. texts, tokens: how many were audited. scores: standard scores by name; `limit` is the largest that
    passes. scored: number of tokens that were judged. impossible: number of tokens that the settings cut away (at
    temperature 0: that are not the likeliest), by more than rounding explains; `allowed` of them pass. shift: the
    smallest total variation a token, of texts that are sharper or flatter than the target's (p to some power), that
    would have been seen with probability `SURE`; inf if none would. calls: of the server, None if it has no counters or
    no draft is known."""

    texts: int
    tokens: int
    scores: dict[str, float]
    limit: float
    scored: int
    impossible: int
    allowed: int
    shift: float
    calls: ServedCalls | None = None

    @property
    def wrong(self) -> list[str]:
        """Return what did not pass, one phrase each."""
        phrases = [f"{name}: z {z:+.1f}" for name, z in self.scores.items() if not abs(z) <= self.limit]
        if self.impossible > self.allowed:
            phrases.append(f"{self.impossible} of {self.tokens} tokens cannot be drawn from the target")
        return phrases

    @property
    def few(self) -> bool:
        """Return whether the tokens are too few to tell: texts that are not the target's could look like these."""
        return self.scored < LEAST or "likelihood" in self.scores and self.shift > BLUNT

    @property
    def passed(self) -> bool | None:
        """Return whether the texts look sampled from the target; None if they are too few to tell."""
        return False if self.wrong else None if self.few else True

    @property
    def verdict(self) -> str:
        if any(not phrase.startswith(CALLS) for phrase in self.wrong):
            return "the texts are NOT the target's"
        tell = "too few tokens to tell whether " if self.few else ""
        but = ", but NOT with so many target calls" if self.wrong else ""
        return f"{tell}the texts look sampled from the target{but}"

    @property
    def power(self) -> str:
        """Return a sentence about the smallest difference that would have been seen; "" if there is none."""
        if "likelihood" not in self.scores or self.scored < LEAST or self.shift >= 1:
            return ""
        return (
            f"would have seen, with probability {SURE:g}, a difference of sharpness alone (each probability to some "
            f"power) by a total variation of {self.shift:.3f} a token"
        )

    def lines(self) -> list[str]:
        """Return the audit as lines of text: the verdict first, then each score and the power."""
        alarm = f", false alarm probability at most {LEVEL:g}" if self.scores and self.scored >= LEAST else ""
        said = [f"{self.verdict}: {self.tokens} tokens in {self.texts} texts{alarm}"]
        said += [f"  {name:<28} z {z:+7.2f}   (limit {self.limit:.2f})" for name, z in self.scores.items()]
        said.append(f"  impossible tokens            {self.impossible:7d}   (limit {self.allowed})")
        if self.calls:
            said.append(
                f"  target calls: {self.calls.counted} counted, {self.calls.expected:.1f} expected of the texts"
            )
        return said + [f"  {self.power}"] * bool(self.power)


def audit(
    served: Iterable[tuple[int, ServedText]],
    prompts: Sequence[object],
    texts: Sequence[Sequence[int]],
    calls: ServedCalls | None = None,
) -> Audit:
    """Audit texts. served: pairs (index of the text, tokens of it), each token once. prompts: of each text; equal
    prompts must be equal objects. texts: the new token ids of each. calls: of the server that generated them."""
    seed = hash(tuple(map(tuple, texts)))  # of ids: the same in each process
    tally, partner = _Tally(seed), partners(prompts)
    for row, one in served:
        other = partner.get(row)
        tally.add(one, None if other is None else _together(texts[row], texts[other]))
    return tally.audit(len(texts), calls)


def partners(prompts: Sequence[object]) -> dict[int, int]:
    """Return pairs of texts of one prompt, by the index of the first. No text is in two, so that pairs are
    independent."""
    alone: dict[object, int] = {}
    pairs = {}
    for row, prompt in enumerate(prompts):
        if prompt in alone:
            pairs[alone.pop(prompt)] = row
        else:
            alone[prompt] = row
    return pairs


def _together(text: Sequence[int], other: Sequence[int]) -> list[bool]:
    """Return whether two texts have the same token, for each token up to the first at which they differ."""
    same = []
    for one, two in zip(text, other, strict=False):
        same.append(one == two)
        if one != two:
            break
    return same


def from_target(
    model: torch.nn.Module,
    prompts: Sequence[list[int]],
    texts: Sequence[list[int]],
    sampling: Sampling,
    vocabulary: int,
    draft: LM | None = None,
) -> Iterator[tuple[int, ServedText]]:
    """Yield (index of the text, tokens of it) with a target in this process, from transformers' own forward of each
    whole text; a long text gives several parts, each with at most `LOGITS` logits. sampling: the settings of the texts.
    vocabulary: number of ids that can be drawn. draft: a draft that is a language model of the same tokens, for the
    order by q / p; ignored if it lacks some of them."""
    knows = draft is not None and draft.size >= vocabulary and sampling.temperature
    models: Any = [model, draft.model] if draft is not None and knows else [model]
    n = max(1, LOGITS // max(one.config.get_text_config().vocab_size for one in models))
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        both = (whole_texts(one, [prompt], [text], sampling, vocabulary, n) for one in models)
        for block, *of_draft in zip(*both, strict=True):
            logits, x = block.logits[0], block.x[0]
            p, high = probs(logits, sampling), wide(logits)
            q = probs(of_draft[0].logits[0], sampling) if of_draft else None
            own, least = at_ids(high, x), high.masked_fill(p == 0, math.inf).amin(-1)
            gap = ((least - own) / block.scale[0]).clamp(min=0)
            yield row, ServedText(x, p, q, gap, greedy=sampling.temperature == 0, start=block.start)


def rank(p: Tensor, x: Tensor, order: Tensor, u: Tensor) -> Tensor:
    """Return sum_{v before x} p_v + u sum_{v as early as x} p_v, (n,) float64: uniform if each x was drawn from its p
    and u is uniform. p, order (n, V): v is before x if its order is smaller. x, u (n,)."""
    own = order.gather(-1, x.unsqueeze(-1))
    before, level = ((p * chosen).sum(-1, dtype=torch.float64) for chosen in (order < own, order == own))
    return before + u * level


class _Tally:
    """The sums of an audit."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.sums = torch.zeros(3, dtype=torch.float64)  # surprise - entropy, its variance, its mean size
        self.equal = torch.zeros(2, dtype=torch.float64)  # equal tokens less those expected, and the variance
        self.favoured = torch.zeros(2, dtype=torch.float64)  # tokens with q > p less those expected, and the variance
        self.ranks: dict[str, list[Tensor]] = {}  # by order, (n,) of each text
        self.tokens, self.impossible = 0, 0

    def add(self, one: ServedText, together: list[bool] | None) -> None:
        """Add tokens. together: whether a second text of the prompt has the same token, up to the first difference."""
        self.tokens += len(one.x)
        p, x = one.p, one.x
        terms = moments(p, x)
        possible = terms[:, 0].isfinite()
        self.impossible += int((~possible if one.gap is None else ~possible & (one.gap > TIE)).sum())
        if one.greedy:
            return
        terms = terms[possible]
        self.sums += torch.stack(
            [(terms[:, 0] - terms[:, 1]).sum(), terms[:, 2].sum(), _spread(p[possible], terms[:, 1]).sum()]
        ).cpu()
        named = p.shape[-1] if one.named is None else one.named
        end = one.start + len(x)
        if together := (together or [])[one.start : end]:
            # two tokens of an outcome that stands for several may differ: such tokens do not count
            square = p[: len(together), :named].square().sum(-1, dtype=torch.float64)
            alike = torch.tensor(together, device=p.device) & (x[: len(together)] < named)
            difference = alike.sum() - square.sum()
            self.equal += torch.stack([difference, (square * (1 - square)).sum()]).cpu()
        orders = {"by p": p}
        if one.named is None:
            orders["by id"] = torch.arange(p.shape[-1], device=p.device).expand_as(p)
        if one.q is not None:
            likelier = one.q > p
            share = (p * likelier).sum(-1, dtype=torch.float64)
            difference = likelier.gather(-1, x.unsqueeze(-1)).sum() - share.sum()
            self.favoured += torch.stack([difference, (share * (1 - share)).sum()]).cpu()
            orders["by q / p"] = one.q / p.clamp(min=torch.finfo(p.dtype).tiny)
        for name, order in orders.items():
            u = torch.rand(len(x), generator=self.generator, dtype=torch.float64).to(p.device)
            self.ranks.setdefault(name, []).append(rank(p, x, order, u)[possible].cpu())

    def audit(self, texts: int, calls: ServedCalls | None) -> Audit:
        scores = {CALLS: calls.z} if calls else {}
        difference, variance, size = self.sums.tolist()
        count = sum(map(len, self.ranks.get("by p", [])))
        if variance > 0:
            scores["likelihood"] = difference / math.sqrt(variance)
        for name, parts in self.ranks.items():
            u = torch.cat(parts)
            scores[f"ranks {name}, mean"] = float((u - 0.5).mean()) * math.sqrt(12 * len(u)) if len(u) else 0.0
            scores[f"ranks {name}, {BINS} bins"] = standard(pearson(torch.histc(u, BINS, 0, 1)), BINS - 1)
        for name in {"by p", "by id"} & {*self.ranks}:
            first = torch.cat([part[:-1] for part in self.ranks[name]])
            second = torch.cat([part[1:] for part in self.ranks[name]])
            if len(first):
                product = (2 * first - 1) * (2 * second - 1)
                scores[f"pairs {name}"] = 3 * float(product.sum()) / math.sqrt(len(first))
                one, two = ((part * CELLS).long().clamp(0, CELLS - 1) for part in (first, second))
                pairs = torch.bincount(one * CELLS + two, minlength=CELLS * CELLS)
                # pairs share ranks: of their statistic, that of the ranks alone is no part (Good 1953)
                statistic = pearson(pairs) - pearson(pairs.view(CELLS, CELLS).sum(1))
                scores[f"pairs {name}, {CELLS * CELLS} cells"] = standard(statistic, CELLS * (CELLS - 1))
        for name, sums in (("equal prompts", self.equal), ("favoured by the draft", self.favoured)):
            more, spread = sums.tolist()
            if spread > 0:
                scores[name] = more / math.sqrt(spread)
        normal = NormalDist()
        limit = SPREAD * normal.inv_cdf(1 - LEVEL / (2 * max(len(scores), 1)))
        # p ** (1 + e) has e * variance nats less, and a total variation of e * size / 2
        power = (limit + SPREAD * normal.inv_cdf(SURE)) / math.sqrt(variance) if variance > 0 else math.inf
        return Audit(
            texts,
            self.tokens,
            dict(sorted(scores.items())),
            limit,
            count or self.tokens,
            self.impossible,
            int(ALLOWED * self.tokens),
            power * size / 2 / count if count and variance > 0 else math.inf,
            calls,
        )


def _spread(p: Tensor, entropy: Tensor) -> Tensor:
    """Return the mean size (n,) of -log p(x) - H(p) for x from p (n, V). entropy (n,): H(p)."""
    return (p * (p.where(p > 0, 1.0).log() + entropy.unsqueeze(-1)).abs()).sum(-1, dtype=torch.float64)


def pearson(counts: Tensor) -> float:
    """Return Pearson's statistic for equal probabilities of the cells. counts: of each cell."""
    expected = float(counts.sum()) / len(counts)
    return float((counts.double() - expected).square().sum()) / expected if expected else 0.0


def standard(statistic: float, degrees: int) -> float:
    """Return the standard score (Wilson and Hilferty 1931) of a statistic that is distributed as chi-squared."""
    root = math.copysign(abs(statistic / degrees) ** (1 / 3), statistic)
    return (root - 1 + 2 / (9 * degrees)) / math.sqrt(2 / (9 * degrees))
