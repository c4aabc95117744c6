"""Forced rounds: what a proposer of any kind would draft at every token of texts that are known, and with which
distributions.

A round begins at every token of a text, and the real proposer drafts as it does when it serves, but each of its draws
is replaced by the text's own next token. Its distributions along the text are then those of a round that accepts every
draft, which is all that the acceptance of the text depends on. B texts, T tokens of the longest, A rows of a round, K
drafts of a round, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from inference.engine import Engine
from inference.exactness.figures import Figures
from inference.exactness.forced_trees import close_edge, close_ranks, levels_of, reach_along, reach_grown
from inference.exactness.ties import near_ties
from inference.measure.timing import Emitted
from inference.proposers.base import Outcome, Proposal, Siblings
from inference.round import DecodingRound
from inference.sampling import Sampling, one_hot
from inference.slots import Run


class ForcedRound(DecodingRound):
    """A round whose draws are the ids `follows` (A, K). By depth, drawn: distributions (A, V) of the draws, scored (A,
    V): the draft's scores, as settings that read history leave them, and close (A,): where the two best of these are
    less than `gap` apart. Of trees also offered (A, m): the children that would have been drawn, and whether these are
    certain; of trees that distributions decide edges (A,): at each choice, whether rounding could change it."""

    follows: Tensor
    gap: float
    drawn: dict[int, Tensor]
    scored: dict[int, Tensor]
    close: dict[int, Tensor]
    offered: dict[int, Tensor]
    certain: bool
    edges: list[Tensor]

    @property
    def temperatures(self) -> list[float] | None:
        return None  # no draws but by `draw`

    def inputs(self, trees: bool = False) -> dict[str, Tensor] | None:
        return None

    def scores(self, logits: Tensor, drafted: list[Tensor]) -> Tensor:
        found = super().scores(logits, drafted)
        self.scored[len(drafted)], self.close[len(drafted)] = found, near_ties(found, self.gap)
        return found

    def draw(self, probs: Tensor, depth: int) -> Tensor:
        self.drawn[depth] = probs
        return self.follows[:, depth]

    def left_out(self, scores: Tensor, kept: int, levels: int) -> None:
        self.edges.append(close_edge(scores, kept, levels * self.gap).view(len(scores), -1).any(1))

    def children(self, logits: Tensor, x: Tensor, siblings: Siblings, likeliest: bool = False) -> tuple[Tensor, Tensor]:
        depth = len(siblings.paths[0])
        ids, distributions = super().children(logits, x, siblings, likeliest)
        self.drawn[depth], self.offered[depth] = distributions[:, 0, 0], ids[:, 0]
        self.certain = likeliest or not any(self.batch.regimes.temperatures)
        if self.certain:
            self.close[depth] = close_ranks(self.branch_scores(logits, x, siblings)[:, 0], ids.shape[2], self.gap)
        next_one = self.follows[:, min(depth, self.follows.shape[1] - 1)]
        return next_one.view(-1, 1, 1).expand(ids.shape), distributions


@torch.inference_mode()
def forced(engine: Engine, texts: Emitted, sampling: Sampling, max_new_tokens: int, noise: float = 0.0) -> Figures:
    """Forced rounds of an engine's own proposer at every token of `texts`, each at the draft length that the engine's
    policy and the limit `max_new_tokens` give it there. They take a pass of the target over k + 1 ids for every token,
    on the engine's own slots: a stream of it ends here. noise: of score gaps, see `ties.compare_passes`.
    """
    lengths = torch.tensor([len(text) for text in texts.tokens])
    B, T = len(texts.tokens), int(lengths.max())
    rounds = [_batch(engine, texts, sampling, max_new_tokens, noise, low) for low in range(0, B, engine.rows)]
    K = max((found.logq.shape[1] for batch in rounds for found in batch), default=0)
    reach = _together([[found.reach for found in batch] for batch in rounds], rounds, B, T)
    logp, near_p, k = torch.zeros(B, T), torch.zeros(B, T, dtype=torch.bool), torch.zeros(B, T, dtype=torch.int64)
    logq = torch.full((B, T + K, K), -torch.inf, dtype=torch.float64)  # as far as rounds draft
    alpha, near_q = torch.zeros(B, T + K, K, dtype=torch.float64), torch.zeros(B, T + K, K, dtype=torch.bool)
    logp = logp.double()
    for batch in rounds:
        for t, found in enumerate(batch):
            logp[found.rows, t], near_p[found.rows, t], k[found.rows, t] = found.logp, found.near_p, found.k
            for j in range(found.logq.shape[1]):
                logq[found.rows, t + j, j], alpha[found.rows, t + j, j] = found.logq[:, j], found.alpha[:, j]
                near_q[found.rows, t + j, j] = found.near_q[:, j]
    inside = torch.arange(T) < lengths[:, None]
    logq, alpha, near_q = (part[:, :T].masked_fill(~inside[..., None], 0) for part in (logq, alpha, near_q))
    return Figures(logp, logq, alpha, near_p, near_q, k, lengths, reach)


def _together(parts: list[list[Tensor | None]], rounds: list[list["_Found"]], B: int, T: int) -> Tensor | None:
    """The reach of all rounds (B, T, D+1), 1 at no draft at all; None where no round has any."""
    depths = [part.shape[1] for batch in parts for part in batch if part is not None]
    if not depths:
        return None
    reach = torch.zeros(B, T, max(depths), dtype=torch.float64)
    reach[..., 0] = 1
    for batch, found in zip(parts, rounds, strict=True):
        for t, (part, one) in enumerate(zip(batch, found, strict=True)):
            if part is not None:
                reach[one.rows, t, : part.shape[1]] = part
    return reach


class Along(NamedTuple):
    """A forced round of the texts numbered `rows` (A,), which accepts nothing: logits and p (A, N+1, V) of the target's
    pass, and how many tokens of each text follow, left (A,)."""

    rows: Tensor
    round: ForcedRound
    proposal: Proposal
    logits: Tensor
    p: Tensor
    left: Tensor


class _Found(NamedTuple):
    """One round of the texts numbered `rows`: of its first token (A,), and of the drafts by depth (A, K)."""

    rows: Tensor
    logp: Tensor
    near_p: Tensor
    k: Tensor
    logq: Tensor
    alpha: Tensor
    near_q: Tensor
    reach: Tensor | None = None


def _batch(
    engine: Engine, texts: Emitted, sampling: Sampling, max_new_tokens: int, noise: float, low: int
) -> list[_Found]:
    """What the rounds of as many texts as the engine has rows say, from number `low` on."""
    found = []
    for one in rounds_along(engine, texts, sampling, max_new_tokens, low, noise):
        round, p, drafts = one.round, one.p, one.proposal
        chain = drafts if drafts.tree is None else Proposal(drafts.x[:, :0], None, [0] * len(drafts.k))
        here = _recorded(round, p, one.logits, chain, noise, sampling)
        here = here if drafts.tree is None else _of_tree(round, p, drafts, here, one.left)
        found.append(here._replace(rows=one.rows))
    return found


def rounds_along(
    engine: Engine, texts: Emitted, sampling: Sampling, max_new_tokens: int, low: int = 0, noise: float = 0.0
) -> Iterator[Along]:
    """Forced rounds of as many texts as the engine has rows, from number `low` on: one a token of the longest. noise:
    the `gap` of their scores."""
    part = slice(low, low + engine.rows)
    run = engine.begin(texts.prompts[part], max_new_tokens, sampling, 0, texts.ids[part], True)
    engine.slots.admit(run)
    tokens = texts.tokens[part]
    while run.active:
        yield _round(engine, run, [tokens[row.index] for row in run.active], noise, low)
        for row in run.active:
            row.text.append(tokens[row.index][row.emitted])
            if row.emitted == len(tokens[row.index]):
                row.finish = "length"
        engine.slots.leave(run)


def _round(engine: Engine, run: Run, tokens: Sequence[list[int]], noise: float, low: int) -> Along:
    """One round of the active rows, whose texts go on with `tokens`."""
    target, k = engine.target, run.lengths(engine.policy)
    round = ForcedRound(run.active, k, engine.rule, run.noise, target.vocabulary, target.device, run.batch)
    width = max(*k, 1)
    nexts = [text[row.emitted : row.emitted + width] for row, text in zip(run.active, tokens, strict=True)]
    round.follows = torch.tensor([one + [0] * (width - len(one)) for one in nexts], device=target.device)
    round.gap, round.drawn, round.scored, round.close, round.offered, run.batch = noise, {}, {}, {}, {}, round.batch
    round.edges = []
    proposal = engine.propose(round)
    seen = engine.read(round, proposal)
    p = round.target_probs(seen.logits, proposal.x, proposal.k, proposal.tree)
    if run.proposer:
        nothing = torch.zeros(len(k), dtype=torch.int64, device=target.device)
        run.proposer.commit(Outcome([len(text) for text in round.texts], nothing, seen.states))
    rows = torch.tensor([low + row.index for row in run.active])
    left = [len(text) - row.emitted for row, text in zip(run.active, tokens, strict=True)]
    return Along(rows, round, proposal, seen.logits, p, torch.tensor(left, device=p.device))


def _of_tree(round: ForcedRound, p: Tensor, proposal: Proposal, found: _Found, left: Tensor) -> _Found:
    """What the round says of its tree, beside what it says of its first token. left (A,): tokens of each text that
    follow."""
    assert proposal.tree is not None
    levels, shape = levels_of(proposal), proposal.tree.shape
    D = len(round.drawn) if shape else max(levels)
    x = round.follows[:, [min(j, round.follows.shape[1] - 1) for j in range(D)]]
    inside = torch.arange(D, device=x.device) < left.unsqueeze(1)
    nodes, seed = round.length(proposal.k), round.starts[0] * 2**20 + round.ids[0] % 2**20
    if shape is None:
        reach = reach_grown(proposal, x, inside, nodes) if round.rule.branches else None
        near = torch.stack(round.edges, 1).any(1, keepdim=True).cpu() & (torch.tensor(levels) > 0).unsqueeze(1)
    else:
        reach = reach_along(p, round.drawn, round.offered, x, inside, shape, nodes, round.rule, round.certain, seed)
        near = torch.stack([round.close[j] for j in range(D)], 1) if round.certain else torch.zeros_like(inside)
        drafted = torch.arange(D) < torch.tensor(levels).unsqueeze(1)
        near = (near.cpu() & drafted & inside.cpu()).any(1, keepdim=True)
    first = reach[:, 1:2].cpu() if reach is not None else torch.zeros(len(x), 1, dtype=torch.float64)
    nothing = torch.zeros_like(first)
    return found._replace(k=torch.tensor(levels), logq=nothing, alpha=first, near_q=near,
                          reach=None if reach is None else reach.double().cpu())  # fmt: skip


def _recorded(
    round: ForcedRound, p: Tensor, logits: Tensor, proposal: Proposal, noise: float, sampling: Sampling
) -> _Found:
    """What a round says of the tokens that follow it. p (A, K+1, V), of which column j holds where the drafts before
    were the text's tokens."""
    x, K = proposal.x, proposal.x.shape[1]
    follows, first = round.follows[:, :K], round.follows[:, 0]
    q = _distributions(round, p, proposal)
    drafted = torch.arange(K, device=x.device) < round.length(proposal.k).unsqueeze(1)
    along = pad((x == follows)[:, :-1].to(torch.int64).cumprod(1), (1, 0), value=1) if K else drafted
    met = drafted & (along > 0)
    qx = q.gather(-1, follows.unsqueeze(-1)).squeeze(-1).double()
    px = p[:, 0].gather(-1, first.unsqueeze(-1)).squeeze(-1).double()
    overlap = (
        torch.minimum(p[:, :K], q).sum(-1).clamp(max=1).double()
    )  # float32 distributions sum to one but for rounding
    close = [round.close.get(j, torch.zeros_like(first, dtype=torch.bool)).to(x.device) for j in range(K)]
    near_q = torch.stack(close, 1) & (q.amax(-1) == 1) if K else drafted
    near_p = near_ties(logits[:, 0], noise) & (sampling.temperature == 0)
    return _Found(
        rows=torch.empty(0),
        logp=px.clamp(min=torch.finfo(torch.float32).tiny).log().cpu(),
        near_p=near_p.cpu(),
        k=torch.tensor(proposal.k),
        logq=torch.where(met, qx, 0).log().cpu(),
        alpha=torch.where(met, overlap, 0).cpu(),
        near_q=(near_q & met).cpu(),
    )


def _distributions(round: ForcedRound, p: Tensor, proposal: Proposal) -> Tensor:
    """The distributions (A, K, V) that drafts were drawn from, whatever the proposal says of them: a kind that
    misstates its distributions is then predicted as it drafts, and measured as it is verified. The proposal's own where
    it drew none."""
    K = proposal.x.shape[1]
    if proposal.q is None:
        return one_hot(proposal.x, p[:, :K])
    if K and set(range(K)) <= set(round.drawn):
        return torch.stack([round.drawn[j].to(p.device) for j in range(K)], 1)
    return proposal.q
