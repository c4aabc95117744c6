"""Draft heads on the target's newest state: Medusa (Cai et al. 2024, 2401.10774) and Hydra (Ankner et al. 2024,
2402.05109). This module has their networks, for training and for serving, and the proposers.

The anchor is a text's last token; the target has not read it when a round begins. The newest state is therefore at the
token before the anchor. Head j (0-based) predicts the token j + 2 positions after that token, so head 0 predicts the
first new token. The target's own head computes the logits. Medusa's heads see neither the anchor nor each other's
drafts. Hydra's head j also reads the embeddings of j + 1 tokens: the anchor, and the drafts of heads 0 to j - 1.

K heads or drafts, L blocks per head, D width of the target's states, N states, A rows, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel

from inference.drafts.compatibility import same_sizes
from inference.models.checksum import Stamp
from inference.models.markov import MarkovHead
from inference.models.passes import LAST, States
from inference.models.pretrained import widened
from inference.models.replay import Replay, replay_of
from inference.models.step import Follow, Nodes, after_anchor, by_round, one_by_one
from inference.proposers.base import Host, LoadArguments, Outcome, Proposal, Proposer, Round
from inference.proposers.trees import TreeShape, trees_of

Given = Mapping[str, Tensor]  # newest (A, D): states; anchor (A, 1): the ids after them


class MedusaConfig(PretrainedConfig):
    """The config of Medusa heads. hidden_size, vocab_size: the target's D and V. num_heads, num_hidden_layers: K and L
    (the names are vLLM's). markov_rank: rank of the Markov head, 0 for none."""

    model_type = "medusa"

    def __init__(
        self,
        hidden_size: int = 16,
        vocab_size: int = 32,
        num_heads: int = 4,
        num_hidden_layers: int = 1,
        markov_rank: int = 0,
        **other: Any,
    ) -> None:
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.num_heads, self.num_hidden_layers, self.markov_rank = num_heads, num_hidden_layers, markov_rank
        super().__init__(**{"tie_word_embeddings": False} | other)


class HydraConfig(MedusaConfig):
    """The config of Hydra heads. num_hidden_layers: hidden layers of each head, always 1."""

    model_type = "hydra"

    def __init__(self, **settings: Any) -> None:  # transformers would generate one otherwise
        super().__init__(**settings)


class HeadsNetwork(PreTrainedModel):
    """The common part of the networks of Medusa and Hydra. Its config has the target's sizes; it has no embeddings."""

    base_model_prefix = ""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        self.markov_head: MarkovHead | None = None  # of the kinds that have one

    def get_input_embeddings(self) -> Any:
        """Return None, since the heads read the target's states."""
        return None

    def get_output_embeddings(self) -> Any:
        """Return None, since the target's head makes the logits."""
        return None

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing, since `__init__` has initialised the weights."""

    @property
    def depths(self) -> int:
        """Return the largest number of drafts per round."""
        return int(self.config.num_heads)

    def fits(self, target: PreTrainedModel, where: str) -> None:
        """Raise ValueError if the target's width or vocabulary size differs from the heads'. where: the start of the
        message."""
        same_sizes(self.config, target, where)


class MedusaNetwork(HeadsNetwork):
    """The Medusa heads. Each block computes x + silu(W x + b), with weight (K, L, D, D) and bias (K, L, D). Both are
    zero before training, so that every head returns the state unchanged."""

    config_class = MedusaConfig

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        count = config.num_heads, config.num_hidden_layers
        self.weight = nn.Parameter(torch.zeros(*count, config.hidden_size, config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(*count, config.hidden_size))
        if config.markov_rank:
            self.markov_head = MarkovHead(config.vocab_size, config.markov_rank, config.vocab_size)
        self.post_init()

    def states(self, newest: Tensor, heads: int) -> Tensor:
        """Return the states (heads, N, D) that the target's head reads. newest (N, D): the newest states. heads: number
        of heads to compute, from head 0 on. There is one batched product per block."""
        x = newest.to(self.weight.dtype).expand(heads, *newest.shape)
        for weight, bias in zip(self.weight[:heads].unbind(1), self.bias[:heads].unbind(1), strict=True):
            x = x + F.silu(torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2)))
        return x


class HydraNetwork(HeadsNetwork):
    """The Hydra heads. Head j reads a state s and embeddings e_0 to e_j, each scaled to a mean square of 1. It gives s
    + U_j silu(W_j s + b_j + sum_i V_ij e_i). U is zero before training, so that every head returns the state unchanged.

    One product adds token i (token 0 is the anchor) to the sums of heads i, i + 1, ... state (K, D, D): W. out (K, D,
    D): U. bias (K, D): b. tokens (K (K + 1) / 2, D, D): V_ij, ordered by i, then by j >= i.
    """

    config_class = HydraConfig

    def __init__(self, config: HydraConfig) -> None:
        super().__init__(config)
        K, D = config.num_heads, config.hidden_size
        self.state = nn.Parameter(torch.empty(K, D, D).normal_(std=D**-0.5))
        self.bias = nn.Parameter(torch.zeros(K, D))
        self.tokens = nn.Parameter(torch.empty(K * (K + 1) // 2, D, D).normal_(std=D**-0.5))
        self.out = nn.Parameter(torch.zeros(K, D, D))
        self.post_init()

    def read_state(self, newest: Tensor, heads: int) -> Tensor:
        """Return the sums W_j s + b_j (heads, N, D) of the first `heads` heads, before any token is added. newest (N,
        D): the states s."""
        x = newest.to(self.state.dtype).expand(heads, *newest.shape)
        return torch.baddbmm(self.bias[:heads].unsqueeze(1), x, self.state[:heads].transpose(1, 2))

    def read(self, sums: Tensor, embedded: Tensor, i: int) -> Tensor:
        """Add token i (0 for the anchor, i for the draft of head i - 1) to the sums (n, N, D) of heads i, i + 1, ...,
        and return the new sums. embedded: the token's embeddings, (N, D) or (n, N, D)."""
        first = i * self.depths - i * (i - 1) // 2
        e = F.rms_norm(embedded.to(self.tokens.dtype), embedded.shape[-1:]).expand(sums.shape)
        return torch.baddbmm(sums, e, self.tokens[first : first + len(sums)].transpose(1, 2))

    def head_states(self, sums: Tensor, newest: Tensor, j: int) -> Tensor:
        """Return the states (N, D) of head j, which the target's head reads. sums (N, D): the sums of head j with all
        its tokens. newest (N, D): the target's newest states."""
        return torch.addmm(newest.to(self.out.dtype), F.silu(sums), self.out[j].T)


class DraftHeads(Proposer):
    """A proposer that drafts with heads on the newest state, at the token before the anchor.

    network: the heads, used unchanged. greedy: whether to draft argmax q, with a one-hot distribution, instead of
    drawing from q. shape: the tree to draft, as the parent of each node (-1 for the text); None for chains. After a
    prompt of one token there is no state, so the first round drafts nothing. If the target's passes are CUDA graphs,
    all drafts of a round are one graph.
    """

    reads = (LAST,)
    drafts_trees = True

    def __init__(self, network: HeadsNetwork, greedy: bool = False, *, shape: TreeShape = None) -> None:
        self.network, self.greedy = network.eval(), greedy
        self.branching = trees_of(shape)
        self.depths = self.most = network.depths
        self.newest: Tensor  # (slots, D)
        self.blank: list[bool] = []  # rows without a state
        self.host: Host
        self.stamp: Stamp  # of the network that recordings read
        self.replay, self.opened = Replay(network), False  # as it is until it is open

    @classmethod
    def load(cls, folder: Path, arguments: LoadArguments) -> "DraftHeads":
        """Return a proposer for a draft folder. Raises FileNotFoundError if the folder does not exist, and ValueError
        if its files or weights are damaged or if the target's sizes differ from the heads'."""
        network = cast(HeadsNetwork, widened(cls.load_network(folder, arguments)))
        return cls(network, arguments.greedy, shape=arguments.shape)

    @classmethod
    def fits(cls, network: Any, target: PreTrainedModel, where: str) -> None:
        network.fits(target, where)

    @property
    def asks(self) -> bool:
        return self.branching is None and not self.replay.records

    @property
    def weights(self) -> str:
        return str(self.network.dtype).removeprefix("torch.")

    def open(self, host: Host) -> None:
        """Begin a call, and allocate the newest states (slots, D). Raises ValueError if the target's sizes differ from
        the heads', and for trees that the heads cannot draft."""
        target = host.target
        if self.branching:
            self.branching.require(host.vocabulary, self.depths)
        self.network.fits(target.model, type(self).__name__)
        again = self.opened and self.host == host and self.stamp.holds(self.network)
        self.host, self.blank = host, []
        self.newest = target.no_states(host.rows + host.spare, (LAST,))[LAST].new_zeros(
            host.rows + host.spare, self.network.config.hidden_size
        )
        if not again:  # CUDA graphs run the head of the target that they were recorded with
            self.replay, self.opened = replay_of(target.model, target.graphs), True
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
            return Proposal.empty(k, self.newest.device)
        shape = self.branching
        sent = round.send(shape.nodes(k) if shape else k)
        given = {"newest": self.newest[: len(k)], "anchor": sent["anchor"]}
        x, q = self.replay.of_round(
            round, ("heads",), given, self._drafted, K, K, greedy=self.greedy, trees=bool(shape)
        )
        return shape.proposal(k, x, q) if shape else Proposal(x, q, k)

    def _drafted(self, round: Round, given: Given, K: int) -> tuple[Tensor, Tensor]:
        """Return the drafts of K depths, (A, K) or (A, N) for trees, and the distributions (A, K or N, V) that they
        were drawn from. This is a function of tensors. given: `newest` (A, D), the target's newest states, and `anchor`
        (A, 1), the ids of the anchors."""
        if self.branching:
            return self.branching.grown(round, K, *self.unrolled(given, K), self.greedy)
        return one_by_one(K, *self.unrolled(given, K), by_round(round, self.greedy))

    def unrolled(self, given: Given, K: int) -> tuple[Tensor, Follow]:
        """Return the logits (A, V) of the first draft, and a function that returns the logits (A, n, V) after drafted
        ids (A, n), called level after level, K - 1 times at most. Both are functions of tensors. given: `newest` (A,
        D), the target's newest states, and `anchor` (A, 1), the ids of the anchors."""
        raise NotImplementedError(f"{type(self).__name__}.unrolled")

    def commit(self, outcome: Outcome) -> None:
        rows = torch.arange(len(outcome.accepted), device=self.newest.device)
        self.newest[: len(rows)] = outcome.states[LAST][rows, outcome.accepted]
        self.blank = [False] * len(rows)

    def move(self, source: int, target: int) -> None:
        if source != target:
            self.newest[target], self.blank[target] = self.newest[source], self.blank[source]
        self.blank.pop()


class Medusa(DraftHeads):
    """A proposer whose heads see neither the anchor nor earlier drafts. All nodes at one depth of a tree have the same
    distribution, unless a Markov head adds a term for the preceding token."""

    network_class: Any = MedusaNetwork

    def unrolled(self, given: Given, K: int) -> tuple[Tensor, Follow]:
        logits = self.host.target.head(self.network.states(given["newest"], K)).transpose(0, 1)  # (A, K, V)
        markov = self.network.markov_head
        term = None if markov is None else lambda ids: markov(ids)[..., : logits.shape[-1]]
        return after_anchor(logits, given["anchor"][:, 0], term)


class Hydra(DraftHeads):
    """A proposer whose heads see the anchor and earlier drafts. Each draft takes four small products. All nodes at one
    depth of a tree are computed together in four such products."""

    network_class: Any = HydraNetwork

    def unrolled(self, given: Given, K: int) -> tuple[Tensor, Follow]:
        network, target, newest = self.network, self.host.target, given["newest"]
        sums = network.read(network.read_state(newest, K), target.embedded(given["anchor"][:, 0]), 0)
        sums = sums.transpose(0, 1).unsqueeze(1)  # (A, nodes, later heads, D): sums along each node's path

        def follow(ids: Tensor, nodes: Nodes) -> Tensor:
            nonlocal sums
            before = nodes.of_parents(sums)[:, :, 1:].flatten(0, 1).transpose(0, 1)
            read = network.read(before, target.embedded(ids).flatten(0, 1), nodes.depth)
            sums = read.transpose(0, 1).unflatten(0, ids.shape)
            return logits(nodes.depth)

        def logits(depth: int) -> Tensor:
            states = newest.repeat_interleave(sums.shape[1], 0)
            return target.head(network.head_states(sums[:, :, 0].flatten(0, 1), states, depth)).unflatten(
                0, sums.shape[:2]
            )

        return logits(0)[:, 0], follow
