"""A Markov head. It adds a term for the previously drafted token to the logits of a draft that was computed without it.

Drafts of one pass are independent of each other. A low-rank table of token pairs, added to the logits while tokens are
drawn in order, repairs part of that (DSpark, 2607.05147). Each draft is then drawn from a distribution that depends on
the draft before it, as in any chain, so verification stays exact.

r rank, V vocabulary of the target, Vd of the draft.
"""

from torch import Tensor, nn


class FromZero(nn.Linear):
    """A linear layer whose weights and bias start at zero."""

    def reset_parameters(self) -> None:
        for weight in self.parameters():
            nn.init.zeros_(weight)


class MarkovHead(nn.Module):
    """A low-rank table of token pairs. markov_w1 (V, r): a row for the token before. markov_w2 (Vd, r): its product
    with that row is added to the logits; it is zero before training. Names are those that engines load."""

    def __init__(self, vocabulary: int, rank: int, draft_vocabulary: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = FromZero(rank, draft_vocabulary, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=rank**-0.5)

    def forward(self, ids: Tensor) -> Tensor:
        """Return (..., Vd) for tokens (...), to be added to the logits of the tokens after them."""
        logits: Tensor = self.markov_w2(self.markov_w1(ids))
        return logits
