"""A parallel draft. A small causal LM predicts all tokens of a round in one pass, at mask tokens after the text."""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from inference.models.forward import picked_columns
from inference.models.markov import Term, term_of
from inference.models.step import WIDTHS, Drafts, Run, behind
from inference.proposers.base import Host, Outcome, Proposal, Proposer, Round
from inference.proposers.independent import Independent
from inference.proposers.trees import StaticTrees, TreeShape, from_one_pass

MASK, DEPTHS = "pard_token", "pard_depths"  # keys of config.json: the id of a mask; the drafts per round in training


class Parallel(Independent):
    """A proposer that drafts k tokens in one pass over the text's last token (the anchor) and k - 1 mask tokens (PARD:
    An et al. 2025, 2504.18583).

    Without a Markov head (`models.markov`), the distribution at depth j (0-based) depends on the text and j mask
    tokens, not on earlier drafts, so all nodes at one depth of a tree have the same distribution. With the head, the
    preceding token adds a term to a draft's logits, so drafts are drawn in order from the same pass. The next round
    overwrites the keys and values of mask tokens. A round drafts at most as many tokens as in training (`pard_depths`
    of the config).

    model, int8: as in `Independent`. greedy: whether to draft the likeliest tokens. shape: the tree to draft,
    as the parent of each node (-1 for the text); None for chains. Raises ValueError if the model's config lacks
    `pard_token` or `pard_depths`.
    """

    language_model = Proposer.language_model  # the distribution after a text depends on the depth

    def __init__(
        self,
        model: PreTrainedModel | str | PathLike[str],
        greedy: bool = False,
        *,
        int8: bool = False,
        shape: TreeShape = None,
    ) -> None:
        super().__init__(model, greedy, int8=int8, shape=shape)
        self.mask, self.most = mask_of(self.model.config)
        self.depths = self.most
        self.term: Term | None = None  # of the Markov head

    def open(self, host: Host) -> None:
        super().open(host)
        self.term = term_of(self.model, host.vocabulary)

    @property
    def asks(self) -> bool:
        return False  # one pass drafts all tokens: to end the round after some of them would save nothing of it

    def propose(self, round: Round) -> Proposal:
        """Return the drafts of a round, at most round.k[b] for row b. A text that is longer than the draft's context
        gets no drafts."""
        most = [min(self.most, self.lm.context - len(text)) for text in round.texts]
        k = [max(0, min(wanted, least)) for wanted, least in zip(round.k, most, strict=True)]
        K = min(max(k), self.branching.depth) if self.branching else max(k)
        if K == 0:
            return Proposal.empty(k, self.lm.device)
        self.longest = max(self.longest, K)
        self._fill_gaps(round.texts, k)
        depths, shape = self.longest if self.lm.graphs else K, self.branching
        sent = round.send(shape.nodes(k) if shape else k, **self._masked(round.texts, k, depths))
        given = {name: sent[name].to(self.lm.device) for name in ("masked", "begins", "anchors")}
        ids, begins, run = given["masked"], list(self.stored), masks(self.greedy, self.term, shape)
        self.stored = [len(text) if k else begin for text, k, begin in zip(round.texts, k, begins, strict=True)]
        drafts = None
        if not shape:
            drafts = self.lm.drafts(round, ("masks",), run, given, ids, max(begins) + ids.shape[1], depths, self.greedy)

        def read(ids: Tensor, at: Tensor, only: Tensor) -> Tensor:
            return picked_columns(self.lm.forward(ids, begins, at=at).logits, only)

        x, q = drafts or run(read, round, given, K)
        return shape.proposal(k, x, q) if shape else Proposal(x[:, :K], q[:, :K], k)

    def commit(self, outcome: Outcome) -> None:
        """Receive the outcome of the round, but ignore its path: the slots hold only text, since no pass reads nodes of
        a tree."""
        super().commit(outcome._replace(path=None))

    def _masked(self, texts: Sequence[list[int]], k: list[int], depths: int) -> dict[str, Any]:
        """Return three entries per row. `masked`: the ids that the row's slot lacks, then mask tokens up to the widest
        row's width. `begins`: the position of the first of these ids. `anchors`: the column of the text's last token
        (the anchor). A row without drafts has only its last id in place of the lacking ids; it is written after the
        row's stored tokens. k, depths: drafts per row, and in the widest row."""
        rows = zip(texts, k, self.stored, strict=True)
        tails = [text[stored:] if wanted else text[-1:] for text, wanted, stored in rows]
        width = max(map(len, tails)) + depths - 1
        if self.lm.graphs:  # few widths are recorded; more masks at the end do not change earlier results
            width = min((wide for wide in WIDTHS if wide >= width), default=width)
        masked = [tail + [self.mask] * (width - len(tail)) for tail in tails]
        return {"masked": masked, "begins": list(self.stored), "anchors": [len(tail) - 1 for tail in tails]}


def masks(greedy: bool, term: Term | None, shape: StaticTrees | None) -> Run:
    """Return a function of tensors that drafts with one pass over mask tokens, in one call (`LM.drafts`). The
    function's inputs are `masked` (A, n), the ids that a slot lacks, then mask tokens; `begins` (A,), the position of
    the first id; and `anchors` (A,), the column of the text's last token.

    greedy: whether to draft the likeliest tokens. term: the Markov head's function, or None. shape: the trees to draft,
    None for chains.
    """

    def run(read: Callable[..., Tensor], round: Any, given: Mapping[str, Tensor], K: int) -> Drafts:
        ids, anchors = given["masked"], given["anchors"]
        logits = read(ids, given["begins"], behind(anchors, K))
        return from_one_pass(round, logits, shape, greedy, picked_columns(ids, anchors)[:, 0], term)

    return run


def mask_of(config: PreTrainedConfig) -> tuple[int, int]:
    """Return the id of the mask token, and the number of drafts per round in training. Raises ValueError if the config
    lacks one of them."""
    mask, depths = (getattr(config, name, None) for name in (MASK, DEPTHS))
    if mask is None or depths is None:
        raise ValueError(
            f"config.json of a parallel draft must have {MASK}, the id of the mask token, and {DEPTHS}, the number of "
            f"drafts per round in training; it has {mask} and {depths}"
        )
    return int(mask), int(depths)
