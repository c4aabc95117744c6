"""A Markov head. It adds a term for the previously drafted token to logits that were computed without that token.

Drafts of one pass are independent of each other. A low-rank table of token pairs, added to the logits while tokens are
drawn in order, makes each draft depend on the draft before it (DSpark, 2607.05147). Each draft is drawn from that
distribution, as in any chain, so verification stays exact.

The Markov head of a causal LM is one more module of the LM. Its rank is in the LM's config. Before training its terms
are zero, so a plain causal LM can get one.

r rank, V vocabulary of the target, Vd of the draft.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from inference.models.small_heads import VOCABULARY, spread_logits

# ids (...) of tokens -> (..., V), added to the logits after them
Term = Callable[[Tensor], Tensor]
MARKOV, MODULE = "markov_rank", "markov_head"  # the key of config.json, 0 or absent for none; the module of a network


class FromZero(nn.Linear):
    """A linear layer whose weights and bias start at zero."""

    def reset_parameters(self) -> None:
        for weight in self.parameters():
            nn.init.zeros_(weight)


class MarkovHead(nn.Module):
    """A low-rank table of token pairs. markov_w1 (V, r): a row for each preceding token. markov_w2 (Vd, r): the product
    with that row is added to the logits; zero before training. The names are those that serving engines load.
    vocabulary: V. rank: r. draft_vocabulary: Vd."""

    def __init__(self, vocabulary: int, rank: int, draft_vocabulary: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = FromZero(rank, draft_vocabulary, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=rank**-0.5)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the terms (..., Vd) that are added to the logits of the next tokens. ids (...): the preceding
        tokens."""
        return self.markov_w2(self.markov_w1(ids))


def markov_of(network: PreTrainedModel) -> MarkovHead | None:
    """Return the Markov head of a causal LM, or None if it has none."""
    head = getattr(network, MODULE, None)
    return head if isinstance(head, MarkovHead) else None


def put_markov_head(network: PreTrainedModel) -> MarkovHead:
    """Add an untrained Markov head to a causal LM, in place, as the LM's config describes it, and return the head. If
    the LM gets a small head too, add that first. Raises ValueError for a rank that is no whole number above 0."""
    rank, size = getattr(network.config, MARKOV, None), network.config.get_text_config().vocab_size
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(
            f"{MARKOV} in config.json must be a whole number above 0, not {rank!r}: use "
            "the config.json that belongs to the weights"
        )
    tokens = getattr(network.config, VOCABULARY, None) or size
    head = MarkovHead(size, rank, tokens).to(network.device, network.dtype)
    network.add_module(MODULE, head)
    return head


def remove_markov_head(network: PreTrainedModel) -> bool:
    """Remove the Markov head of a causal LM, and its rank from the config, in place. Returns whether there was one."""
    if markov_of(network) is None:
        return False
    delattr(network, MODULE)
    delattr(network.config, MARKOV)
    return True


def spread_of(network: PreTrainedModel, vocabulary: int) -> Callable[[Tensor], Tensor]:
    """Return a function from the Markov head's terms (..., Vd) to terms (..., vocabulary) by id of the target. Ids
    outside a pruned vocabulary get -inf. Ids from the LM's vocabulary size on get 0, since the LM's logits give them no
    mass."""
    size = network.config.get_text_config().vocab_size
    known = getattr(network.get_output_embeddings(), "known", None)
    every = (lambda logits: logits) if known is None else partial(spread_logits, known=known, size=size)
    return lambda logits: pad(every(logits), (0, vocabulary - size))


def term_of(network: PreTrainedModel, vocabulary: int) -> Term | None:
    """Return a function from the ids (...) of the preceding tokens to the terms (..., vocabulary) that the Markov head
    adds to the next tokens' logits. Return None without a Markov head. Ids that the LM lacks are read as its last id.
    """
    markov = markov_of(network)
    if markov is None:
        return None
    last, spread_out = network.config.get_text_config().vocab_size - 1, spread_of(network, vocabulary)
    return lambda ids: spread_out(markov(ids.clamp(max=last)))
