"""Output heads that cost less than a full head. They have a pruned vocabulary, a low rank, or both.

With a vocabulary of 49 to 152 thousand tokens, the head is most of the cost of a small draft. A pruned head has rows
for some tokens only; the draft never drafts other tokens. A head of low rank is a product of two matrices, with rank *
(D + tokens) numbers instead of D * tokens. `SmallHead` is the head of a causal LM. Feature drafts use `projection` with
a vocabulary in their own format (`inference.proposers.eagle`).

D width, V ids, Vd tokens in the draft's vocabulary, r rank.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

VOCABULARY, RANK = "draft_vocab_size", "head_rank"  # keys of config.json
CHUNK = 2**14  # rows of a head that are in float64 at once


class LowRank(nn.Module):
    """A matrix of low rank: `up` (Vd, r) times `down` (r, D). width: D. tokens: Vd. rank: r."""

    def __init__(self, width: int, tokens: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, tokens, bias=False)

    @property
    def weight(self) -> Tensor:
        """Return `up` (Vd, r), the matrix with a row for each token. It has the head's dtype and device."""
        return self.up.weight

    def forward(self, states: Tensor) -> Tensor:
        return self.up(self.down(states))


Projection = nn.Linear | LowRank


def projection(width: int, tokens: int, rank: int | None) -> Projection:
    """Return a module from states (..., D) to logits (..., Vd), with random weights. width: D. tokens: Vd. rank: r,
    None for a full-rank matrix. Raises ValueError unless the rank is from 1 to the smaller of D and Vd."""
    if rank is None:
        return nn.Linear(width, tokens, bias=False)
    if not 1 <= rank <= min(width, tokens):
        raise ValueError(
            f"{RANK} must be from 1 to {min(width, tokens)}, the smaller size of the head's matrix "
            f"of {tokens} tokens by {width}, not {rank}"
        )
    return LowRank(width, tokens, rank)


@torch.no_grad()
def fill(head: Projection, weight: Tensor) -> None:
    """Set the weights of a projection, in place, from weight (Vd, D): to a copy of it, or to the nearest product of the
    projection's rank."""
    if isinstance(head, nn.Linear):
        head.weight.copy_(weight)
    elif not (weight.is_meta or head.weight.is_meta):
        up, down = factors(weight, head.down.out_features)
        head.up.weight.copy_(up)
        head.down.weight.copy_(down)


def factors(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return up (Vd, r) and down (r, D). Their product is the matrix of rank r with the least sum of squared
    differences from weight (Vd, D). With the truncated singular value decomposition U S V^T, up is U sqrt(S) and down
    is sqrt(S) V^T.

    V and S^2 are the eigenvectors and eigenvalues of weight^T weight, in float64, since decomposing a matrix with
    150,000 rows would take minutes. Directions with a singular value of 0 become 0.
    """
    parts = weight.split(CHUNK)
    products: Tensor = sum(part.double().T @ part.double() for part in parts)
    squares, vectors = torch.linalg.eigh(products)  # in rising order
    root = squares[-rank:].flip(0).clamp(min=0).pow(0.25)
    basis = vectors[:, -rank:].flip(1)
    least = squares[-1].clamp(min=0).pow(0.25) * 1e-8
    inverse = torch.where(root > least, 1 / root, 0.0)
    up = torch.cat([((part.double() @ basis) * inverse).to(weight.dtype) for part in parts])
    return up, (root.unsqueeze(1) * basis.T).to(weight.dtype)


def spread_logits(logits: Tensor, known: Tensor, size: int) -> Tensor:
    """Return logits (..., size) in which all ids outside `known` have -inf. logits (..., Vd): entry i is for the id
    known[i]. known (Vd,)."""
    return logits.new_full((*logits.shape[:-1], size), -torch.inf).index_copy_(-1, known, logits)


def spread_probs(probs: Tensor, known: Tensor, size: int) -> Tensor:
    """Return distributions (..., size) in which all ids outside `known` have 0, or NaN if the distribution is NaN.
    probs (..., Vd): entry i is for the id known[i]. known (Vd,)."""
    none = probs[..., :1] - probs[..., :1]
    return none.repeat(*[1] * (probs.dim() - 1), size).index_copy_(-1, known, probs)


class SmallHead(nn.Module):
    """The output embeddings of a causal LM, from states (..., D) to logits (..., V). width: D. size: V. tokens: Vd,
    None if all ids have a row. rank: r, None for a full-rank matrix.

    Two attributes are used before training and are not saved: undecided, whether `know` must still choose the tokens;
    and rows (V, D), the full head that `know` takes rows from, or None.
    """

    known: Tensor | None

    def __init__(self, width: int, size: int, tokens: int | None = None, rank: int | None = None) -> None:
        super().__init__()
        self.size, self.undecided = size, False
        self.rows: Tensor | None = None
        self.projection = projection(width, tokens or size, rank)
        self.register_buffer("known", torch.arange(tokens) if tokens else None)

    @property
    def weight(self) -> Tensor:
        """Return the matrix (Vd, D or r) with a row for each token. It has the head's dtype and device."""
        return self.projection.weight

    def forward(self, states: Tensor) -> Tensor:
        logits: Tensor = self.projection(states)
        return logits if self.known is None else spread_logits(logits, self.known, self.size)

    def begin(self, rows: Tensor | None) -> None:
        """Set the weights, in place, from a full head, rows (V, D). If `rows` is None, the weights stay random. The
        vocabulary is the first Vd ids until `know` has chosen others."""
        self.undecided, self.rows = self.known is not None, rows
        if rows is not None:
            fill(self.projection, rows if self.known is None else rows[: len(self.known)])

    @torch.no_grad()
    def know(self, ids: Sequence[int]) -> None:
        """Set the vocabulary. Set the weights from the rows of these tokens in the full head that `begin` was given, if
        there was one. ids: Vd ids in ascending order."""
        assert self.known is not None
        self.known.copy_(torch.tensor(list(ids)))
        if self.rows is not None:
            fill(self.projection, self.rows[self.known.to(self.rows.device)].to(self.weight.device))
        self.undecided, self.rows = False, None


def is_small(config: PreTrainedConfig) -> bool:
    """Return whether a causal LM's config has the keys of a small head."""
    return any(getattr(config, key, None) for key in (VOCABULARY, RANK))


def put_small_head(network: PreTrainedModel) -> SmallHead:
    """Replace a causal LM's output embeddings, in place, by the small head that its config describes, with random
    weights. Returns the head.

    Raises ValueError for a head with a bias, and for a pruned vocabulary if the model caps its logits: no token could
    then have a logit of -inf.
    """
    config, plain = network.config.get_text_config(), network.get_output_embeddings()
    tokens, rank = (getattr(network.config, key, None) for key in (VOCABULARY, RANK))
    name = type(network).__name__
    if getattr(plain, "bias", None) is not None:
        raise ValueError(
            f"{name}: its head has a bias, and small heads support none: set {VOCABULARY} and {RANK} to null in "
            "config.json"
        )
    if tokens and getattr(config, "final_logit_softcapping", None):
        raise ValueError(
            f"{name}: {VOCABULARY} in config.json must be null, since this model caps its logits, so that a token "
            "without a row would still have mass"
        )
    head = SmallHead(config.hidden_size, config.vocab_size, tokens, rank)
    for linear in linears(head):
        if not linear.weight.is_meta:
            nn.init.normal_(linear.weight, std=getattr(config, "initializer_range", 0.02))
    head = head.to(network.device, network.dtype)
    network.set_output_embeddings(head)
    for one in (network.config, config):
        one.tie_word_embeddings = False
    network.all_tied_weights_keys = {}
    return head


def linears(head: Any) -> list[nn.Linear]:
    """Return the linear layers of any head, or [] for None."""
    return [] if head is None else [module for module in head.modules() if isinstance(module, nn.Linear)]


def require_known(network: nn.Module, where: str) -> None:
    """Raise ValueError if the ids of a pruned head in the network are not distinct ids of the target. Drafts of a wrong
    id would be rejected, or an index would be out of range. where: the start of the message."""
    for name, module in network.named_modules():
        if isinstance(module, SmallHead) and module.known is not None:
            refuse_ids(module.known, module.size, f"{where}: tensor {name}.known")


def refuse_ids(known: Tensor, size: int, where: str) -> None:
    """Raise ValueError unless known (Vd,) are distinct ids from 0 to size - 1. where: the start of the message."""
    if known.is_meta:
        return
    outside = known[(known < 0) | (known >= size)]
    if len(outside):
        raise ValueError(
            f"{where}: id {int(outside[0])} of the draft's vocabulary is not from 0 to {size - 1}: export the draft "
            "again"
        )
    ids, counts = known.unique(return_counts=True)
    if len(ids) < len(known):
        raise ValueError(
            f"{where}: id {int(ids[counts > 1][0])} is in the draft's vocabulary more than once: export the draft again"
        )
