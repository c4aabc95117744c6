"""Forced rounds. They show the distributions that a proposer of any kind drafts from, at every token of given texts.

One forced round starts at every token of a text. The proposer drafts as it does while serving, but each draw returns
the text's next token. So the distributions are those of a round that accepts every draft, and they determine
acceptance. In a tree, every child of every node gets the text's next token, so all nodes at one depth follow the same
text. The first node at a depth therefore has the distribution of a round that follows the text to this depth, for trees
of any shape.

B texts, T tokens of the longest, A rows per round, K drafts per round, D levels, C children, N nodes, V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from inference.engine import Engine
from inference.exactness.figures import Figures
from inference.exactness.ties import near_ties
from inference.output import Emitted
from inference.proposers.base import Outcome, Proposal, Siblings
from inference.round import DecodingRound
from inference.sampling import Sampling, at_ids, one_hot, up_to
from inference.scheduler import Call
from inference.verify.predict_tree import reach_of_round
from inference.verify.rules import Rule
from inference.verify.tree import depths_of, ranks_of, usable_lengths


@torch.inference_mode()
def forced(engine: Engine, texts: Emitted, sampling: Sampling, max_new_tokens: int, noise: float = 0.0) -> Figures:
    """Return the figures of `texts`, from forced rounds of the engine's proposer (`Proposer.for_forced_rounds`) at
    every token.

    texts: what the engine emitted. sampling: the settings of that run. max_new_tokens: its limit. Draft lengths follow
    from the engine's policy and this limit. noise: the largest change, by rounding, of the gap between two scores; it
    decides which tokens count as near a tie. Each token costs a target pass over k + 1 ids, or over a tree. The
    engine's slots are overwritten, so a stream of the engine cannot continue.
    """
    lengths = texts.lengths
    B, T = len(texts.tokens), int(lengths.max())
    rounds = [
        [_figures(one, noise, sampling) for one in rounds_along(engine, texts, sampling, max_new_tokens, low, noise)]
        for low in range(0, B, engine.rows)
    ]
    K = max((one.logq.shape[1] for batch in rounds for one in batch), default=0)
    D = max((one.reach.shape[1] for batch in rounds for one in batch if one.reach is not None), default=0)
    reach = torch.zeros(B, T, D, dtype=torch.float64)
    reach[..., :1] = 1
    logp = torch.zeros(B, T, dtype=torch.float64)
    near_p, k = torch.zeros(B, T, dtype=torch.bool), torch.zeros(B, T, dtype=torch.int64)
    logq = torch.full((B, T + K, K), -torch.inf, dtype=torch.float64)  # the last rounds draft past T
    alpha, near_q = torch.zeros(B, T + K, K, dtype=torch.float64), torch.zeros(B, T + K, K, dtype=torch.bool)
    for batch in rounds:
        for t, one in enumerate(batch):
            logp[one.rows, t], near_p[one.rows, t], k[one.rows, t] = one.logp, one.near_p, one.k
            for j in range(one.logq.shape[1]):
                logq[one.rows, t + j, j], alpha[one.rows, t + j, j] = one.logq[:, j], one.alpha[:, j]
                near_q[one.rows, t + j, j] = one.near_q[:, j]
            if one.reach is not None:
                reach[one.rows, t, : one.reach.shape[1]] = one.reach
    inside = up_to(lengths, T)
    logq, alpha, near_q = (part[:, :T].masked_fill(~inside[..., None], 0) for part in (logq, alpha, near_q))
    return Figures(logp, logq, alpha, near_p, near_q, k, lengths, reach if D else None)


class Along(NamedTuple):
    """One forced round of A texts. No draft is committed, so the next round starts one token later. rows (A,): the
    numbers of the texts. round, proposal: the round and its drafts. logits, p (A, N+1, V): of the target pass. left
    (A,): number of tokens that each text still has."""

    rows: Tensor
    round: "ForcedRound"
    proposal: Proposal
    logits: Tensor
    p: Tensor
    left: Tensor


def rounds_along(
    engine: Engine, texts: Emitted, sampling: Sampling, max_new_tokens: int, low: int = 0, noise: float = 0.0
) -> Iterator[Along]:
    """Yield forced rounds of as many texts as the engine has rows, beginning with text number `low`. There is one round
    for each token of the longest text. noise: the largest gap between two scores that rounding could close."""
    part = slice(low, low + engine.rows)
    engine = copy(engine)
    engine.proposer = engine.proposer and engine.proposer.for_forced_rounds
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


def _round(engine: Engine, run: Call, tokens: Sequence[list[int]], noise: float, low: int) -> Along:
    """Run one forced round of the active rows. tokens: all new tokens of each row's text. noise: the largest gap
    between two scores that rounding could close. low: number of the first text."""
    target, k = engine.target, run.lengths(engine.policy)
    round = ForcedRound(run.active, k, engine.rule, run.noise, target.vocabulary, target.device, run.batch)
    run.batch = round.batch
    round.force([text[row.emitted :] for row, text in zip(run.active, tokens, strict=True)], noise)
    proposal = engine.propose(round)
    seen = engine.target_pass(round, proposal)
    p = round.target_probs(seen.logits, proposal.x, proposal.k, proposal.tree)
    if run.proposer:
        nothing = torch.zeros(len(k), dtype=torch.int64, device=target.device)
        run.proposer.commit(Outcome([len(text) for text in round.texts], nothing, seen.states))
    rows = torch.tensor([low + row.index for row in run.active])
    left = [len(text) - row.emitted for row, text in zip(run.active, tokens, strict=True)]
    return Along(rows, round, proposal, seen.logits, p, torch.tensor(left, device=p.device))


class ForcedRound(DecodingRound):
    """A round in which every draw returns the text's next ids, `follows` (A, K).

    It records, by depth (0-based): `drawn` (A, V), the distribution of the draw; `scored` (A, V), the draft's scores
    after the settings that read the text; and `close` (A,), whether the two best scores are at most `gap` apart. For
    trees it also records `offered` (A, m), the children that would have been drawn, and `certain`, whether these are
    the likeliest tokens.
    """

    follows: Tensor
    gap: float
    drawn: dict[int, Tensor]
    scored: dict[int, Tensor]
    close: dict[int, Tensor]
    offered: dict[int, Tensor]
    certain: bool
    reads_ids = True  # the text's own

    def force(self, nexts: Sequence[list[int]], gap: float) -> None:
        """Set the tokens that draws return. nexts: the next tokens of each row's text; past its end, draws return 0.
        gap: the largest gap between two scores that counts as `close`."""
        width = max(*self.k, 1)
        padded = [(text + [0] * width)[:width] for text in nexts]
        self.follows, self.gap = torch.tensor(padded, device=self.device), gap
        self.drawn, self.scored, self.close, self.offered = {}, {}, {}, {}

    def chain_draws(self, *_: Any) -> None:
        """Return None, so that every draw goes through `draw`: an operator would draw other tokens than the text's."""

    def pure(self, *_: Any) -> None:
        """Return None, as `chain_draws`: a recording would not record the distributions."""

    def scores(self, logits: Tensor, drafted: list[Tensor]) -> Tensor:
        scores = super().scores(logits, drafted)
        self.scored[len(drafted)], self.close[len(drafted)] = scores, near_ties(scores, self.gap)
        return scores

    def draw(self, probs: Tensor, depth: int | Tensor) -> Tensor:
        if isinstance(depth, Tensor):  # of inner rounds, which draw by themselves
            return super().draw(probs, depth)
        self.drawn[depth] = probs
        return self.follows[:, depth]

    def children(self, logits: Tensor, x: Tensor, siblings: Siblings, likeliest: bool = False) -> tuple[Tensor, Tensor]:
        depth = len(siblings.paths[0])
        ids, distributions = super().children(logits, x, siblings, likeliest)
        self.drawn[depth], self.offered[depth] = distributions[:, 0, 0], ids[:, 0]
        self.certain = likeliest or not any(self.batch.regimes.temperatures)
        if self.certain:
            self.close[depth] = close_ranks(self.branch_scores(logits, x, siblings)[:, 0], ids.shape[2], self.gap)
        return self.follows[:, min(depth, self.follows.shape[1] - 1)].view(-1, 1, 1).expand(ids.shape), distributions


class _RoundFigures(NamedTuple):
    """The numbers of one forced round that `Figures` has at every token. rows (A,): the numbers of the texts. logp,
    near_p, k (A,): of the round's first token. logq, alpha, near_q (A, K): of the drafts, by depth. reach (A, D+1): for
    trees, P(the round accepts at least n nodes | the text); else None."""

    rows: Tensor
    logp: Tensor
    near_p: Tensor
    k: Tensor
    logq: Tensor
    alpha: Tensor
    near_q: Tensor
    reach: Tensor | None = None


def _figures(one: Along, noise: float, sampling: Sampling) -> _RoundFigures:
    proposal = one.proposal
    if proposal.tree is None:
        return _of_chain(one, proposal, noise, sampling)
    return _of_tree(one, _of_chain(one, Proposal(proposal.x[:, :0], None, [0] * len(proposal.k)), noise, sampling))


def _of_chain(one: Along, proposal: Proposal, noise: float, sampling: Sampling) -> _RoundFigures:
    """Return the figures of a chain's tokens. Column j of p (A, K+1, V) is used only if the drafts before it are the
    text's tokens. one: the round. proposal: its drafts. noise: the largest gap between two scores that rounding could
    close."""
    round, p = one.round, one.p
    x, K = proposal.x, proposal.x.shape[1]
    follows, first = round.follows[:, :K], round.follows[:, 0]
    q = _distributions(round, p, proposal)
    k = usable_lengths(p[:, : K + 1], q, round.length(proposal.k))  # a draft without a distribution ends the round
    drafted = up_to(k, K)
    along = pad((x == follows)[:, :-1].to(torch.int64).cumprod(1), (1, 0), value=1) if K else drafted
    met = drafted & (along > 0)
    qx = at_ids(q, follows).double()
    px = at_ids(p[:, 0], first).double()
    # float32 distributions sum to one but for rounding
    overlap = torch.minimum(p[:, :K], q).sum(-1).clamp(max=1).double()
    close = [round.close.get(j, torch.zeros_like(first, dtype=torch.bool)).to(x.device) for j in range(K)]
    near_q = torch.stack(close, 1) & (q.amax(-1) == 1) if K else drafted
    near_p = near_ties(one.logits[:, 0], noise) & (sampling.temperature == 0)
    return _RoundFigures(
        rows=one.rows,
        logp=px.clamp(min=torch.finfo(torch.float32).tiny).log().cpu(),
        near_p=near_p.cpu(),
        k=k.cpu(),
        logq=torch.where(met, qx, 0).log().cpu(),
        alpha=torch.where(met, overlap, 0).cpu(),
        near_q=(near_q & met).cpu(),
    )


def _distributions(round: ForcedRound, p: Tensor, proposal: Proposal) -> Tensor:
    """Return the distributions (A, K, V) that the drafts were really drawn from, so that a proposer that reports other
    distributions fails the check; column j for depth j (0-based). If nothing was drawn, return the proposal's
    distributions. p (A, K+1, V): the target's distributions, for the dtype and device."""
    K = proposal.x.shape[1]
    if proposal.q is None:
        return one_hot(proposal.x, p[:, :K])
    if K and set(range(K)) <= set(round.drawn):
        return torch.stack([round.drawn[j].to(p.device) for j in range(K)], 1)
    return proposal.q


def _of_tree(one: Along, first_token: _RoundFigures) -> _RoundFigures:
    """Return the figures of a round that drafts a tree. first_token: the figures of the round's first token. one: the
    round."""
    round, proposal = one.round, one.proposal
    assert proposal.tree is not None
    shape = proposal.tree.shape
    depths = (0, *depths_of(shape))
    levels = torch.tensor([max(depths[: nodes + 1]) for nodes in proposal.k])  # rows may draft fewer than the tree has
    D = len(round.drawn)
    x = round.follows[:, [min(j, round.follows.shape[1] - 1) for j in range(D)]]
    inside = up_to(one.left, D)
    nodes, seed = round.length(proposal.k), round.starts[0] * 2**20 + round.ids[0] % 2**20
    reach = reach_along(one.p, round.drawn, round.offered, x, inside, shape, nodes, round.rule, round.certain, seed)
    near = torch.stack([round.close[j] for j in range(D)], 1) if round.certain else torch.zeros_like(inside)
    drafted = up_to(levels, D)
    near = (near.cpu() & drafted & inside.cpu()).any(1, keepdim=True)
    first = reach[:, 1:2].cpu() if reach is not None else torch.zeros(len(x), 1, dtype=torch.float64)
    nothing = torch.zeros_like(first)
    return first_token._replace(
        k=levels,
        logq=nothing,
        alpha=first,
        near_q=near,
        reach=None if reach is None else reach.double().cpu(),
    )


def reach_along(
    p: Tensor,
    drawn: Mapping[int, Tensor],
    offered: Mapping[int, Tensor],
    x: Tensor,
    inside: Tensor,
    shape: tuple[int, ...],
    nodes: Tensor,
    rule: Rule,
    certain: bool,
    seed: int,
) -> Tensor | None:
    """Return the reach (A, D+1) float64: P(the round accepts at least n nodes | the text). Return None if acceptance
    under the rule depends on noise.

    p (A, N+1, V): distributions of the target pass. drawn: by depth (0-based), the draft's distribution (A, V).
    offered: by depth, the children (A, m) that would have been drawn. certain: whether these are the likeliest tokens.
    x (A, D): the text's next tokens. inside (A, D): whether the text has such a token. shape: the parent of each node.
    nodes (A,): number of nodes in use. rule: the verification rule. seed: of the rule's random samples.
    """
    if rule.branches is None:
        return None
    depths = depths_of(shape)
    D = max(depths)
    if certain:
        C = max(ranks_of(shape)) + 1
        met = [pad(offered[j] == x[:, j : j + 1], (0, C - offered[j].shape[1])) for j in range(D)]
        accept = (torch.stack(met, 1) & inside.unsqueeze(-1)).double()
        return reach_of_round(accept, shape, nodes)
    columns = [0, *(1 + depths.index(depth) for depth in range(1, D))]
    exists = inside.unsqueeze(-1)
    p_levels = torch.where(exists, p[:, columns], 0).double()
    q_levels = torch.where(exists, torch.stack([drawn[j].to(p.device) for j in range(D)], 1), 0).double()
    return rule.branches(p_levels, q_levels, x, shape, nodes, seed)


def close_ranks(scores: Tensor, m: int, gap: float) -> Tensor:
    """Return (A,) bool: whether rounding could change which m tokens are the likeliest, or their order. scores (A, V):
    the draft's. gap: rounding may change the order of two scores that are closer than this."""
    if m == 1:
        return near_ties(scores, gap)
    top = scores.topk(min(m + 1, scores.shape[-1]), -1).values
    return ((top[:, :-1] - top[:, 1:]) < gap).any(-1)
