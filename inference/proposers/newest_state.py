"""Kinds that draft from the target's newest state alone: which one that is, slot by slot, and rounds over it.

A rows, K drafts, D width of the target's states, V vocabulary.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from inference.models.checksum import Stamp
from inference.models.passes import LAST, States
from inference.models.replays import Replays
from inference.models.step import by_round
from inference.proposers.base import Host, Outcome, Proposal, Proposer, Round
from inference.proposers.branching import Follow, one_by_one
from inference.proposers.growing import Growing, Shape, trees_of
from inference.proposers.medusa_network import Heads

Given = Mapping[str, Tensor]  # newest (A, D), the states; anchor (A, 1), the ids behind them


class NewestState(Proposer):
    """Drafts with heads on the state of the token before the anchor, the newest that there is as a round begins.

    network: the heads, used as they are; greedy: draft argmax q with a one-hot distribution instead of drawing from q.
    shape: of the trees that it drafts, as of `Independent`; None: chains. A prompt of one token has no state: its first
    round drafts nothing. Where the target's passes are replayed (`cuda_graphs`), all drafts of a round are one graph.
    """

    reads = (LAST,)

    def __init__(self, network: Heads, greedy: bool = False, *, shape: Shape = None) -> None:
        self.network, self.greedy = network.eval(), greedy
        self.branching = trees_of(shape)
        self.depths = self.most = network.depths
        self.newest: Tensor  # (slots, D)
        self.blank: list[bool] = []  # rows without a state
        self.host: Host
        self.stamp: Stamp  # of the network that recordings read
        self.replays: Replays | None = None

    @property
    def weights(self) -> str:
        return str(self.network.dtype).removeprefix("torch.")

    def open(self, host: Host) -> None:
        """Raises ValueError for a target of other sizes than the heads were made for, and for a shape that they cannot
        draft."""
        target = host.target
        if self.branching:
            self.branching.require(host.vocabulary, self.depths)
        self.network.fits(target.model, type(self).__name__)
        again = self.replays is not None and self.host == host and self.stamp.holds(self.network)
        self.host, self.blank = host, []
        self.newest = target.no_states(host.rows + host.spare, (LAST,))[LAST].new_zeros(
            host.rows + host.spare, self.network.config.hidden_size
        )
        if not again:  # recordings run the head of the target that they were made beside
            self.replays = Replays(target.device) if target.replayed else None
            self.stamp = Stamp(self.network, addresses=True, values=False)

    def admit(self, low: int, prompts: Sequence[list[int]], states: States) -> None:
        self.stage(low, prompts, states)
        self.blank += [len(prompt) == 1 for prompt in prompts]

    def stage(self, low: int, prompts: Sequence[list[int]], states: States) -> None:
        for row, prompt in enumerate(prompts):
            self.newest[low + row] = states[LAST][row, len(prompt) - 2] if len(prompt) > 1 else 0.0

    def enter(self, source: int, target: int, prompt: list[int]) -> None:
        self.newest[target] = self.newest[source]
        self.blank.append(len(prompt) == 1)

    def propose(self, round: Round) -> Proposal:
        k = [0 if blank else min(k, self.most) for k, blank in zip(round.k, self.blank, strict=True)]
        K = min(max(k), self.branching.depth) if self.branching else max(k)
        if not K:
            return Proposal(torch.empty(len(k), 0, dtype=torch.int64, device=self.newest.device), None, k)
        shape = self.branching
        sent = round.send(shape.nodes(k), **shape.numbers(k)) if shape else round.send(k)
        given = {"newest": self.newest[: len(k)], "anchor": sent["anchor"]}
        found = None if isinstance(shape, Growing) else self._replayed(round, given, K)
        x, q = self._drafted(round, given, K) if found is None else found
        return shape.proposal(k, x, q) if shape else Proposal(x, q, k)

    def _drafted(self, round: Round, given: Given, K: int) -> tuple[Tensor, Tensor]:
        """Drafts of K depths and the distributions that they were drawn from; a function of tensors."""
        if self.branching:
            return self.branching.grown(round, K, *self.unrolled(given, K), self.greedy)
        return one_by_one(K, *self.unrolled(given, K), by_round(round, self.greedy))

    def unrolled(self, given: Given, K: int) -> tuple[Tensor, Follow]:
        """Logits (A, V) behind the texts, and what K - 1 more levels are asked of; functions of tensors."""
        raise NotImplementedError(f"{type(self).__name__}.unrolled")

    def _replayed(self, round: Round, given: Given, K: int) -> tuple[Tensor, Tensor] | None:
        """As `_drafted`, by a CUDA graph that was recorded for these shapes; None where there are none, or
        distributions and draws take more than tensors."""
        inputs = round.inputs(bool(self.branching)) if self.replays is not None else None
        if inputs is None or self.replays is None:
            return None

        def run(here: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
            return self._drafted(round.on(here), here, K)

        name = "drafts", K, self.greedy, round.key
        found: tuple[Tensor, Tensor] | None = self.replays(name, {**inputs, **given}, round.steady, lambda: run)
        return found

    def commit(self, outcome: Outcome) -> None:
        rows = torch.arange(len(outcome.accepted), device=self.newest.device)
        self.newest[: len(rows)] = outcome.states[LAST][rows, outcome.accepted]
        self.blank = [False] * len(rows)

    def move(self, source: int, target: int) -> None:
        if source != target:
            self.newest[target], self.blank[target] = self.newest[source], self.blank[source]
        self.blank.pop()
