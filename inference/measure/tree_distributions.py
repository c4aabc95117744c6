"""Distributions of a draft of any kind at every token of texts, by depth: from them every shape is rated, none of which
ran.

A distribution at depth j of a round that begins at token t may hang on t, on j and on the text's tokens between: forced
rounds of chains find it, one round a token. B texts, T tokens of the longest, K depths, V vocabulary.
"""

import copy

import torch
from torch import Tensor

from inference.engine import Engine
from inference.exactness.forced import Along, rounds_along
from inference.measure.timing import Emitted
from inference.measure.tree_plan import Distributions
from inference.policy import Fixed
from inference.proposers.base import Proposer
from inference.sampling import Sampling
from inference.verify.tree_prediction import rank_of


@torch.inference_mode()
def distributions_of_rounds(
    engine: Engine, proposer: Proposer, depths: int, texts: Emitted, sampling: Sampling, max_new_tokens: int
) -> Distributions:
    """q (B, T, K, V) and rank (B, T, K): entry (t, j) of the draft at depth j of the round that begins at token t - j,
    drawn from `proposer`, which drafts chains, beside the engine's target. No mass and the last rank where such a round
    has no draft. max_new_tokens: the limit of the run that made the texts, whose rounds draft no further.

    Takes a pass of the target over K + 1 ids for every token, on the engine's own slots. Raises ValueError for a
    proposer of trees, and for one whose drafts are drawn from no distribution of its own.
    """
    beside, V = copy.copy(engine), engine.target.vocabulary
    beside.proposer, beside.policy = proposer, Fixed(min(depths, proposer.depths or depths))
    lengths = torch.tensor([len(text) for text in texts.tokens])
    B, T, K = len(texts.tokens), int(lengths.max()), beside.policy.k
    p, q = torch.zeros(B, T, V), torch.zeros(B, T + K, K, V)
    rank = torch.full((B, T + K, K), V)
    for low in range(0, B, engine.rows):
        for t, one in enumerate(rounds_along(beside, texts, sampling, max_new_tokens, low)):
            p[one.rows, t] = one.p[:, 0].float().cpu()
            for j in range(max(one.proposal.k)):
                q[one.rows, t + j, j], rank[one.rows, t + j, j] = _at_depth(one, j, V)
    x = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts.tokens], batch_first=True)
    return Distributions(p, q[:, :T], x, lengths, rank[:, :T])


def _at_depth(one: Along, j: int, V: int) -> tuple[Tensor, Tensor]:
    """Distribution (A, V) and rank (A,) of a round's drafts at depth j; none of rows that do not draft so far."""
    round, proposal = one.round, one.proposal
    if proposal.tree is not None or j not in round.drawn or j not in round.scored:
        raise ValueError(
            "distributions by depth are those of chains that a model drafts: give a proposer without a shape"
        )
    drafts = torch.tensor([k > j for k in proposal.k])
    probs, rank = round.drawn[j].float().cpu(), rank_of(round.scored[j], round.follows[:, j]).cpu()
    return torch.where(drafts.unsqueeze(1), probs, 0.0), torch.where(drafts, rank, V)
