"""A feature draft: one decoder layer over what the target knew of each token (EAGLE-3, Li et al. 2025, 2503.01840).

Pair s of a text is the target's features of token s beside the embedding of token s + 1, see `eagle_network`; its keys
and values are in slot s of a cache of one layer. A round first stores the pairs of the tokens that were accepted, with
the features that the target's pass left, then goes on with pairs of its own, which the next round overwrites. Of a tree
of drafts the pair of node i is in slot anchor + 1 + i, the anchor being the text's last pair (see `passes.Tree`).
A rows, n pairs a row, H width, K drafts of a round, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inference.models import llama
from inference.models.cache import SlotCache, Window, tree_window
from inference.models.checksum import Stamp
from inference.models.dtypes import widened
from inference.models.forward import additive, attention, picked, visible
from inference.models.passes import States
from inference.models.replays import Replays
from inference.models.step import by_round
from inference.proposers.base import Beside, Host, Outcome, Proposal, Proposer, Round
from inference.proposers.branching import Nodes, one_by_one
from inference.proposers.eagle_network import EagleNetwork
from inference.proposers.growing import Growing, Shape, trees_of

FIRST_SLOTS, CHUNK = 256, 512  # slots at first; pairs of a prompt that are stored at once


class Eagle(Proposer):
    """Drafts with the network of `eagle_network` beside the target that it was made for, on whose device it is.

    It drafts nothing for a text of one token, of which the target has read nothing. greedy: the likeliest tokens,
    one-hot distributions. compile: on a GPU its rounds are replayed as CUDA graphs, None: where the target's passes
    are. shape: of the trees that it drafts, as of `Independent`; None: chains.
    """

    network_class: Any = EagleNetwork

    def __init__(
        self, network: EagleNetwork, greedy: bool = False, *, compile: bool | None = None,
        shape: Shape = None,
    ) -> None:  # fmt: skip
        self.network, self.greedy, self.compile = network.eval(), greedy, compile
        self.branching = trees_of(shape)
        self.reads = tuple(sorted({*network.config.layers}))
        self.host: Host | None = None
        self.stamp: Stamp  # of the network
        self.stored: list[int] = []  # pairs of each row that its slot holds
        self.waiting: list[int] = []  # pairs behind them whose features are known
        self.longest = 0  # drafts of a replayed round, as many each time

    @classmethod
    def load(cls, folder: Path, beside: Beside) -> "Eagle":
        """From a folder in the EAGLE-3 format. Raises as `load_draft`, and ValueError for one that was made for a
        target of other sizes."""
        network = widened(cls.network_beside(folder, beside))
        return cls(cast(EagleNetwork, network), beside.greedy, compile=beside.compile, shape=beside.shape)

    @classmethod
    def fits(cls, network: Any, target: PreTrainedModel, where: str) -> None:
        network.fits(target, where)

    @property
    def weights(self) -> str:
        return str(self.network.dtype).removeprefix("torch.")

    def open(self, host: Host) -> None:
        config, device = self.network.config, host.target.device
        if self.branching:
            self.branching.require(host.vocabulary, self.depths)
        held = self.network.dtype if device.type == "cuda" else torch.promote_types(self.network.dtype, torch.float32)
        if host != self.host or not self.stamp.holds(self.network):  # slots are kept from call to call
            self.host, rows = host, host.rows + host.spare
            self.stamp = Stamp(self.network, addresses=True, values=False)  # recordings read it
            self.embedding = host.target.model.get_input_embeddings()
            self.shape = llama.Shape(config.num_attention_heads, config.num_key_value_heads, config.head_dim,
                                     self.network.scale, config.rms_norm_eps, held)  # fmt: skip
            self.cache = SlotCache(1, rows, min(FIRST_SLOTS, host.context), host.context)
            like = torch.empty(rows, config.num_key_value_heads, 0, config.head_dim, dtype=held, device=device)
            self.cache.stores[0].lazy_initialization(like, like)
            self.cache.before_growth(self._forget)
            self._forget()
        self.features = self.network.fc.weight.new_zeros(host.rows + host.spare, 1, config.hidden_size)
        self.stored, self.waiting, self.longest = [], [], 0

    def _forget(self) -> None:
        """What was made for the slots that there were: angles, recordings."""
        self.table: tuple[Tensor, Tensor] | None = None
        replayed = self.host is not None and self.host.target.replayed and self.compile is not False
        self.replays = Replays(self.features_device) if replayed else None

    @property
    def features_device(self) -> torch.device:
        return self.network.fc.weight.device

    def stage(self, low: int, prompts: Sequence[list[int]], states: States) -> None:
        """All pairs of the prompts, and the features of their last ones, which begin the first round."""
        A, features = len(prompts), self._features(states)
        width = features.shape[1]
        ids = [prompt[1:] + prompt[-1:] * (width + 1 - len(prompt)) for prompt in prompts]
        every = torch.arange(width, device=features.device).expand(A, width)
        for begin in range(0, width, CHUNK):
            part = slice(begin, begin + CHUNK)
            here = torch.tensor([one[part] for one in ids], device=features.device)
            limit = self._slots(begin + here.shape[1])
            self._layer(here, features[:, part], Window(low, low + A, every[:, part], None, limit))
        last = torch.tensor([max(len(prompt) - 2, 0) for prompt in prompts], device=features.device)
        self.features[low : low + A, 0] = picked(features, last)[:, 0] if width else 0.0

    def admit(self, low: int, prompts: Sequence[list[int]], states: States) -> None:
        self.stage(low, prompts, states)
        for prompt in prompts:
            self._begin(prompt)

    def enter(self, source: int, target: int, prompt: list[int]) -> None:
        self._begin(prompt)
        self._copy(source, target)

    def _begin(self, prompt: list[int]) -> None:
        self.stored.append(max(len(prompt) - 2, 0))
        self.waiting.append(min(len(prompt) - 1, 1))

    def _features(self, states: States) -> Tensor:
        """Without what is not finite, which a slot would keep: such a row ends or goes on without drafts."""
        return self.network.features(states).nan_to_num(0.0, 0.0, 0.0)

    def propose(self, round: Round) -> Proposal:
        """None for rows without a pair."""
        pairs = [len(text) - 1 for text in round.texts]
        lacking = [one - stored for one, stored in zip(pairs, self.stored, strict=True)]
        most = self.depths or max(round.k)
        k = [min(k, most) if one else 0 for k, one in zip(round.k, pairs, strict=True)]
        self.longest = max(self.longest, *k)
        if not max(k):
            return Proposal(torch.empty(len(k), 0, dtype=torch.int64, device=self.features_device), None, k)
        shape, short = self.branching, max(lacking) <= self.longest + 1
        fixed = self.replays is not None and short and not isinstance(shape, Growing)
        K, width = (self.longest, self.longest + 1) if fixed else (max(k), max(*lacking, 1))
        K = min(K, shape.depth) if shape else K
        given = self._given(round, k, lacking, width)
        limit = max(self.stored) + width + (shape.room if shape else K)
        found = self._replayed(round, given, limit, K) if fixed else None
        x, q = self._drafted(round, given, self._slots(limit), K) if found is None else found
        self.stored, self.waiting = pairs, [0] * len(k)
        return shape.proposal(k, x, q) if shape else Proposal(x[:, : max(k)], q[:, : max(k)], k)

    def _given(self, round: Round, k: list[int], lacking: list[int], width: int) -> dict[str, Tensor]:
        """Of the pairs that slots lack, ids of their second tokens (A, width), features (A, width, H), the first's
        place `pairs` (A,) and the last's column `only` (A,); behind a row's last pair stands anything."""
        tails = [text[-one:] if one else text for text, one in zip(round.texts, lacking, strict=True)]
        ids = [tail + tail[-1:] * (width - len(tail)) for tail in tails]
        shape, only = self.branching, [max(one - 1, 0) for one in lacking]
        nodes, numbers = (shape.nodes(k), shape.numbers(k)) if shape else (k, {})
        sent = round.send(nodes, lacking=ids, pairs=self.stored, only=only, **numbers)
        self._room(width)
        found = {name: sent[name].to(self.features_device) for name in ("lacking", "pairs", "only")}
        return found | {"features": self.features[: len(k), :width]}

    def _replayed(self, round: Round, given: Mapping[str, Tensor], limit: int, K: int) -> tuple[Tensor, Tensor] | None:
        """As `_drafted`, by a CUDA graph that was recorded for these shapes; None where distributions take more than
        tensors."""
        inputs = round.inputs(bool(self.branching))
        slots = self._slots(1 << (limit - 1).bit_length())
        if inputs is None or self.replays is None:
            return None

        def run(here: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
            return self._drafted(round.on(here), here, slots, K)

        found: tuple[Tensor, Tensor] | None = self.replays(
            ("eagle", K, slots, round.key), {**inputs, **given}, round.steady, lambda: run
        )
        return found

    def _drafted(self, round: Round, given: Mapping[str, Tensor], slots: int, K: int) -> tuple[Tensor, Tensor]:
        """Drafts of K depths and the distributions that they were drawn from; a function of tensors."""
        ids, features, pairs, only = (given[name] for name in ("lacking", "features", "pairs", "only"))
        positions = pairs.unsqueeze(1) + torch.arange(ids.shape[1], device=ids.device)
        A, anchor = len(ids), pairs + only
        made = picked(self._layer(ids, features, Window(0, A, positions, None, slots)), only)  # of the level above

        def follow(ids: Tensor, nodes: Nodes) -> Tensor:
            nonlocal made
            made = self._layer(ids, nodes.of_parents(made), behind(anchor, nodes, ids.shape[1], slots))
            return self._logits(made)

        logits = self._logits(made)[:, 0]
        if self.branching:
            return self.branching.grown(round, K, logits, follow, self.greedy)
        return one_by_one(K, logits, follow, by_round(round, self.greedy))

    def _logits(self, made: Tensor) -> Tensor:
        """(A, n, H) -> (A, n, V)."""
        return self.network.head(self.network.norm(made), self.vocabulary)

    @property
    def vocabulary(self) -> int:
        assert self.host is not None
        return self.host.vocabulary

    def _slots(self, limit: int) -> int:
        """So many slots are read; there are more where these are too few."""
        self.cache.aim(Window(0, 0, torch.empty(0, 1), None, limit))
        if self.table is None:
            with torch.inference_mode(False), torch.no_grad():
                self.table = self.network.angles(torch.arange(self.cache.slots, device=self.features_device))
        return min(limit, self.cache.slots)

    def _layer(self, ids: Tensor, features: Tensor, window: Window) -> Tensor:
        """Pairs of ids (A, n), features (A, n, H) -> (A, n, H); stored at the window's slots, those up to its limit are
        read."""
        rows, held = slice(window.low, window.high), self.shape.held
        mask = additive(visible(window, ids.device), held)
        row = torch.arange(window.low, window.high, device=ids.device).unsqueeze(1)
        store = self.cache.stores[0]
        assert self.table is not None

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            for kept, new in ((store.keys, k), (store.values, v)):
                kept.transpose(1, 2).index_put_((row, window.slots), new.to(held))
            seen = store.keys[rows, :, : window.limit], store.values[rows, :, : window.limit]
            return attention(mask, self.shape)(q.to(held).transpose(1, 2), *seen).to(features.dtype)

        cos, sin = (part[window.positions] for part in self.table)
        embedded = self.embedding(ids).to(features.dtype)
        return self.network.layer(embedded, features, cos, sin, attend)

    def commit(self, outcome: Outcome) -> None:
        new = self._features(outcome.states)
        A, width = new.shape[:2]
        self._room(max(self.waiting) + width)
        if any(self.waiting):  # nothing was drafted for a while
            row = torch.arange(A, device=new.device).unsqueeze(1)
            columns = torch.tensor(self.waiting, device=new.device).unsqueeze(1)
            self.features[row, columns + torch.arange(width, device=new.device)] = new
        else:
            self.features[:A, :width] = new
        self.stored = [max(min(stored, valid - 1), 0) for stored, valid in zip(self.stored, outcome.valid, strict=True)]
        self.waiting = [max(valid - stored, 0) for stored, valid in zip(self.stored, outcome.valid, strict=True)]

    def _room(self, width: int) -> None:
        """For so many pairs that wait."""
        rows, held, size = self.features.shape
        if width > held:
            wider = self.features.new_zeros(rows, max(width, 2 * held), size)
            wider[:, :held] = self.features
            self.features = wider

    def move(self, source: int, target: int) -> None:
        if source != target:
            self.stored[target], self.waiting[target] = self.stored[source], self.waiting[source]
            self._copy(source, target)
        self.stored.pop()
        self.waiting.pop()

    def _copy(self, source: int, target: int) -> None:
        """The slot of a row whose place is `target` by now."""
        self.cache.move(source, target, self.stored[target])
        self.features[target] = self.features[source]


def behind(anchor: Tensor, nodes: Nodes, n: int, limit: int) -> Window:
    """Where the pairs of n drafts of each row go. anchor (A,): slots of the texts' last pairs; limit: slots to read."""
    if nodes.tree is None:
        return Window(0, len(anchor), anchor.unsqueeze(1) + nodes.depth, None, limit)
    return replace(tree_window(nodes.tree.on(anchor.device), n, anchor, 0), limit=limit)
