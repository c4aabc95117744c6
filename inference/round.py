"""One decoding round of the active rows: it computes their distributions and their random numbers.

A rows, K the largest number of drafts (N nodes of a tree), V vocabulary. Every random number of a row is a function of
the seed, the row's id, the number of tokens that the row had emitted when the round began, the depth and the stream
(see `sampling.noise`). The coupled rule's noise is keyed by the position in the text instead. Each round has one copy
from the host to the device (`DecodingRound.send`) and one read back (the table of `verification.RoundResult`).
"""

from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from functools import cached_property
from operator import is_

import torch
from torch import Tensor

from inference.models.passes import ChainDraws
from inference.models.replay import Pure
from inference.policy import Decisions
from inference.proposers.base import Numbers, Siblings
from inference.request import Request
from inference.sampling.distributions import Regimes, draw, one_hot
from inference.sampling.noise import (
    ACCEPT,
    DRAFT,
    INNER,
    RESIDUAL,
    Uniforms,
    branch_states,
    gumbel_after,
    gumbel_states,
    states_at,
    uniforms,
)
from inference.sampling.penalties import Penalties, apply_processors, needs_history
from inference.verify.rules import Rule
from inference.verify.tree import Tree, likeliest, node_paths, sampled


class Batch:
    """The settings of the active rows as tensors on the device. rows: the A requests. vocabulary: number of ids. A new
    object is made when rows come or go."""

    def __init__(self, rows: Sequence[Request], vocabulary: int, device: torch.device) -> None:
        self.rows, self.vocabulary, self.device = list(rows), vocabulary, device
        self.ids = torch.tensor([row.id for row in rows], device=device)  # (A,)
        sampling = [row.sampling for row in rows]
        self.regimes = Regimes(sampling, device)
        self.penalties = Penalties(rows, vocabulary, device) if any(map(needs_history, sampling)) else None
        self.gumbel: dict[int, Tensor] = {}  # by seed
        self.branches: dict[int, Tensor] = {}
        self.own = [a for a, one in enumerate(sampling) if one.processors]  # rows with processors of their own

    def gumbel_states(self, seed: int) -> Tensor:
        """Return the states (A,) of the hash after seed and row ids; Gumbel noise is computed from them. They are
        computed once per seed."""
        if seed not in self.gumbel:
            self.gumbel = {seed: gumbel_states(seed, self.ids)}
        return self.gumbel[seed]

    def branch_states(self, seed: int) -> Tensor:
        """Return the states (A,) of the hash after seed and row ids, for the noise that draws children of trees. They
        are computed once per seed."""
        if seed not in self.branches:
            self.branches = {seed: branch_states(seed, self.ids)}
        return self.branches[seed]

    @property
    def key(self) -> Hashable:
        """Return a hashable value: two batches with the same value compute distributions by the same operations. Only
        the values of their tensors may differ."""
        return self.regimes.key, self.penalties.key if self.penalties else None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return the settings as tensors on the device, by name; `on` accepts others of these names and shapes."""
        tensors = {f"regimes.{name}": tensor for name, tensor in self.regimes.tensors().items()}
        if self.penalties:
            tensors |= {f"penalties.{name}": tensor for name, tensor in self.penalties.tensors().items()}
        return tensors

    def on(self, tensors: Mapping[str, Tensor]) -> "Batch":
        """Return a copy of this batch that reads its settings from `tensors`, by the names and with the shapes of the
        property `tensors`."""

        def part(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): tensors[name] for name in tensors if name.startswith(prefix)}

        other = copy(self)
        other.regimes = self.regimes.on(part("regimes."))
        other.penalties = self.penalties.on(part("penalties.")) if self.penalties else None
        return other


class DecodingRound:
    """The data that the engine and a proposer share during one round. It implements `proposers.base.Round`.

    rows: the active rows (A). k: largest draft length of each row. rule: the verification rule. noise: the call's
    uniforms. vocabulary: number of token ids. batch: the batch of an earlier round, used again if the rows are the
    same; None for a new batch. decisions: the decisions of an adaptive policy, None for any other policy. device: of
    the target.
    """

    def __init__(
        self,
        rows: Sequence[Request],
        k: list[int],
        rule: Rule,
        noise: Uniforms,
        vocabulary: int,
        device: torch.device,
        batch: Batch | None = None,
        decisions: Decisions | None = None,
    ) -> None:
        self.rows, self.k, self.rule, self.noise, self.decisions = rows, k, rule, noise, decisions
        self.vocabulary, self.device = vocabulary, device
        same = batch is not None and len(rows) == len(batch.rows) and all(map(is_, rows, batch.rows))
        self.batch = batch if batch is not None and same else Batch(rows, vocabulary, device)
        self.texts = [row.text for row in rows]
        self.ids, self.starts = [row.id for row in rows], [row.emitted for row in rows]
        self.messages: dict[int, str] = {}  # by row: the first error of the row's processors
        self.results: dict[tuple[int, ...], Tensor | None] = {}  # of the processors, by row and drafts
        self.exhausted: set[int] = set()  # rows whose processors left no token to draft
        self.sent: dict[str, Tensor] = {}
        self.lengths: list[int] = []  # of the drafts, as they were sent

    # What the host copies to the device

    def send(self, k: list[int] | None = None, **numbers: Numbers) -> dict[str, Tensor]:
        """Copy what this round needs to the device, once; later calls copy only `numbers`. Returns all tensors that
        were copied so far, by name: length, start, offset and read (A,), anchor (A, 1), and `numbers`.

        k: drafts per row, if they differ from the round's k. numbers: further whole numbers to copy, by name: one per
        row, or a list of equal length per row.
        """
        if self.sent:
            self.sent |= send(self.device, **numbers) if numbers else {}
            return self.sent
        self.lengths = list(self.k if k is None else k)
        depths = max(*self.k, *self.lengths) + 1  # a tree has more nodes than levels
        offsets, fresh = self.noise.offsets(self.ids, self.starts, depths)
        read, penalties = [len(text) - 1 for text in self.texts], self.batch.penalties
        if penalties:
            numbers |= {"newest": penalties.newest(), "tails": penalties.tails()}
        self.sent = send(
            self.device,
            length=self.lengths,
            start=self.starts,
            offset=offsets,
            read=read,
            anchor=[text[-1:] for text in self.texts],
            **numbers,
        )
        if fresh:
            self.noise.fill(self.batch.ids, self.sent["start"], depths)
        if penalties:
            penalties.count(self.sent["newest"])
        return self.sent

    def length(self, k: list[int]) -> Tensor:
        """Return the draft lengths `k` as a tensor (A,) on the device."""
        sent = self.send(k)
        return sent["length"] if k == self.lengths else torch.tensor(k, device=self.device)

    # Distributions

    def probs(self, logits: Tensor, drafted: list[Tensor] | None) -> Tensor:
        """Return the distributions (A, V) of the next token under each row's sampling settings.

        logits (A, V): after each row's text and drafts. drafted: for each draft so far, its ids (A,), in order. If it
        is None, logits may have any shape (A, ..., V), and only the settings that do not read the text are applied.
        """
        if drafted is None:
            return self.batch.regimes.probs(logits.to(self.device))
        scores = self.scores(logits, drafted)
        if self.decisions:
            self.decisions.see(len(drafted), scores, self.temperature)
        return self.batch.regimes.probs(scores)

    def goes_on(self, depth: int) -> bool:
        """Return whether to draft another token after the draft at `depth` (0-based)."""
        return self.decisions is None or self.decisions.goes_on(depth, self.k)

    @property
    def decides(self) -> bool:
        """Return whether a policy decides after each draft."""
        return self.decisions is not None and self.decisions.asks

    def scores(self, logits: Tensor, drafted: list[Tensor]) -> Tensor:
        """Return logits (A, V) after the settings that read the text, such as penalties and processors. logits (A, V):
        the draft model's, after each row's text and drafts. drafted: for each draft so far, its ids (A,), in order."""
        logits = logits.to(self.device)
        if self.batch.penalties:
            x = torch.stack(drafted, 1) if drafted else logits.new_empty(len(self.ids), 0, dtype=torch.int64)
            self.send()
            needed = [-1 if a in self.exhausted else k - 1 for a, k in enumerate(self.lengths)]  # none is drawn later
            logits = self._penalised(logits.unsqueeze(1), x, needed, len(drafted)).squeeze(1)
            self.exhausted |= {a for a in self.batch.own if not bool(logits[a].amax().isfinite())}
        return logits

    def target_probs(self, logits: Tensor, x: Tensor, k: list[int], tree: Tree | None = None) -> Tensor:
        """Return the target's distributions p (A, K+1, V). logits (A, K+1, V): column 0 comes after each row's anchor
        (the last token of its text), column i + 1 after draft x[:, i], x (A, K). k: number of drafts of each row; later
        columns have no meaning. tree: the tree of the drafts, None for a chain."""
        if self.batch.penalties and tree is not None:
            logits = self._penalised_tree(logits, x, k, tree)
        elif self.batch.penalties:
            logits = self._penalised(logits, x, k, 0)
        return self.batch.regimes.probs(logits)

    def branch_scores(self, logits: Tensor, x: Tensor, siblings: Siblings) -> Tensor:
        """Apply the settings that read the text to logits (A, n, V) after n nodes of a tree, and return the new logits.
        x (A, M): ids drafted so far. siblings: names the n nodes, and the nodes on the path to each."""
        if not self.batch.penalties:
            return logits
        columns = []
        for node, (path, first) in enumerate(zip(siblings.paths, siblings.first, strict=True)):
            before = torch.stack([x[:, i] for i in path], 1) if path else x[:, :0]
            needed = [len(path) if n > first else -1 for n in self.lengths]
            columns.append(self._penalised(logits[:, node : node + 1], before, needed, len(path)))
        return torch.cat(columns, 1)

    def _penalised(self, logits: Tensor, x: Tensor, k: list[int], first: int) -> Tensor:
        """Apply the settings that read the text to logits (A, n, V), and return the new logits. Column i comes after
        the text and the first `first + i` drafts of x (A, K). k: number of drafts of each row."""
        penalties, sent = self.batch.penalties, self.send()
        assert penalties is not None
        scores = penalties.apply(logits, x, first, sent["tails"], sent["start"])
        if not self.batch.own:
            return scores
        return apply_processors(scores, self.rows, self.batch.own, x, k, first, self.messages, self.results)

    def _penalised_tree(self, logits: Tensor, x: Tensor, k: list[int], tree: Tree) -> Tensor:
        """Apply the settings that read the text to logits (A, N+1, V) after the anchor (column 0) and after each node i
        of a tree (column i + 1), and return the new logits. Each column reads the text and the drafts on the path to
        its node. x (A, N): the nodes' ids. k: number of nodes of each row."""
        columns = [self._penalised(logits[:, :1], x[:, :0], [0] * len(k), 0)]
        for node, path in enumerate(node_paths(tree.shape)):
            before, needed = torch.stack([x[:, i] for i in path], 1), [len(path) if n > node else -1 for n in k]
            columns.append(self._penalised(logits[:, node + 1 : node + 2], before, needed, len(path)))
        return torch.cat(columns, 1)

    @property
    def reads_history(self) -> list[bool]:
        """Return, for each row, whether its settings read the text."""
        return [needs_history(row.sampling) for row in self.rows]

    @property
    def reads_ids(self) -> bool:
        """Return whether settings that read the text, or noise that is shared, give each id a number of its own."""
        return self.rule.shared or self.batch.penalties is not None

    @property
    def temperature(self) -> Tensor:
        """Return the temperature of each row (A,). The tensor is a new object if rows have come or gone."""
        return self.batch.regimes.temperature

    # Draws

    def draw(self, probs: Tensor, depth: int | Tensor) -> Tensor:
        """Return draft ids (A,) drawn from distributions (A, V). depth: the depth of these drafts (0-based), or one per
        row (A,). The random numbers come from the draft stream at this depth. Under a rule that shares noise, they are
        those that also draw the target's token. probs (A, V): the distributions."""
        rows = slice(None) if isinstance(depth, int) else torch.arange(len(depth), device=depth.device)
        if self.rule.shared:
            return (probs.log() + self._gumbel[rows, depth]).argmax(-1)
        return draw(probs, self._numbers[DRAFT - 1, rows, depth])

    def last(self, probs: Tensor) -> Tensor:
        """Return the tokens (A,) that follow the accepted drafts. probs (A, V): their distributions, from the
        verification."""
        return draw(probs, self.last_noise)

    @property
    def last_noise(self) -> Tensor:
        """Return the uniforms (A,) that draw the token after the accepted drafts."""
        return self._numbers[RESIDUAL - 1, :, 0]

    @property
    def test_noise(self) -> Tensor:
        """Return the random numbers with which the rule tests drafts: uniforms (A, K+1 or more), or Gumbel noise (A,
        K+1 or more, V) for a rule that shares noise. Column j is for draft j (0-based)."""
        return self._gumbel if self.rule.shared else self._numbers[ACCEPT - 1]

    def children(self, logits: Tensor, x: Tensor, siblings: Siblings, likeliest: bool = False) -> tuple[Tensor, Tensor]:
        """Return the ids of children (A, n, m) of n nodes of a tree, and the distributions (A, n, m, V) that they were
        drawn from, NaN where the logits allow no token. Each node gets m children; the caller ignores those that the
        tree does not have.

        logits (A, n, V): after the nodes. x (A, M): ids drafted so far. siblings: names the n nodes; m is its `most`.
        Children are sampled without replacement, in the order of verification. Rows of temperature 0, or all rows if
        `likeliest`, get the likeliest tokens with one-hot distributions.
        """
        scores = self.branch_scores(logits.to(self.device), x.to(self.device), siblings)
        m, regimes = siblings.most, self.batch.regimes
        probs = regimes.probs(scores)  # (A, n, V)
        if likeliest or regimes.all_greedy:
            return _likeliest(scores, probs, m)
        ids = sampled(probs, self._gumbel_of(siblings.keys.to(self.device), len(siblings.paths[0])), m)
        distributions = probs.unsqueeze(2).expand(*probs.shape[:2], m, probs.shape[-1])
        if not regimes.some_greedy:
            return ids, distributions
        best, certain = _likeliest(scores, probs, m)
        greedy = regimes.greedy.view(-1, 1, 1)
        return torch.where(greedy, best, ids), torch.where(greedy.unsqueeze(-1), certain, distributions)

    def inner(self, depths: int) -> Tensor | None:
        """Return uniforms (3, A, depths) for the inner rounds that a proposer verifies itself, or None if the rule
        shares noise. Their key has the start of this round. Block verification reads numbers past the token at which it
        stops; without the start, the next round would use these numbers again, and the text would be biased."""
        if self.rule.shared:
            return None
        depth = torch.arange(depths, device=self.device)
        return uniforms(self.noise.seed, self.batch.ids, self.send()["start"], depth, INNER)

    @cached_property
    def _numbers(self) -> Tensor:
        """Return uniforms (S, A, K+1) of the S streams; stream s has index s - 1. On a GPU they cover all depths of the
        noise table, so that one graph serves every K."""
        width = 0 if self.device.type == "cpu" else self.noise.table.shape[-1]
        return self._streams(max(max(*self.k, *self.lengths, 0) + 1, width))

    def _streams(self, depths: int) -> Tensor:
        sent = self.send()
        if depths > self.noise.table.shape[-1]:  # deeper than any round so far
            offsets, _ = self.noise.offsets(self.ids, self.starts, depths)
            self.noise.fill(self.batch.ids, sent["start"], depths)
            sent["offset"] = send(self.device, offset=offsets)["offset"]
        return self.noise.at(sent["offset"], depths)

    @cached_property
    def _gumbel(self) -> Tensor:
        """Return the Gumbel noise (A, K+1, V) that draft and target share; column j is for the token at depth j
        (0-based)."""
        start, depth = self.send()["start"], torch.arange(self._numbers.shape[-1], device=self.device)
        return gumbel_after(self._states, start.unsqueeze(1) + depth, self.vocabulary)

    @cached_property
    def _states(self) -> Tensor:
        return self.batch.gumbel_states(self.noise.seed)

    def _gumbel_of(self, keys: Tensor, depth: int) -> Tensor:
        """Return the Gumbel noise (A, n, V) that draws the children of n nodes. keys (n,): for each node, its column in
        a pass (0 for the anchor, i + 1 for node i). depth: the depth that all these nodes have. Each node has its own
        noise. Under a rule that shares noise, all nodes at a depth use the noise of the target at that position, (A, 1,
        V)."""
        if self.rule.shared:
            depth = min(depth, self._gumbel.shape[1] - 1)  # deeper than any row drafts
            return self._gumbel[:, depth : depth + 1]
        return gumbel_after(self._children, keys.unsqueeze(0), self.vocabulary)

    @cached_property
    def _children(self) -> Tensor:
        return states_at(self._branches, self.send()["start"])

    @cached_property
    def _branches(self) -> Tensor:
        return self.batch.branch_states(self.noise.seed)

    # The round as a function of tensors, see `models.replay`

    def chain_draws(self, depths: int, greedy: bool) -> ChainDraws | None:
        regimes = self.batch.regimes
        greedy = greedy or not any(regimes.temperatures)
        cut = regimes.cut and (greedy or regimes.max_top_k or regimes.any_min_p)
        if self.rule.shared or self.batch.penalties or cut or not (greedy or all(regimes.temperatures)):
            return None
        none = self.temperature[:0]
        return ChainDraws(
            self._streams(depths)[0], none if greedy else self.temperature, regimes.tails if regimes.cut else none
        )

    def pure(self, depths: int = 0, trees: bool = False) -> Pure | None:
        penalties = self.batch.penalties
        if self.batch.own:
            return None
        sent, numbers = self.send(), self._numbers
        numbers = numbers if depths <= numbers.shape[-1] else self._streams(depths)
        tensors = self.batch.tensors | {"start": sent["start"], "uniforms": numbers}
        tensors |= {"tails": sent["tails"]} if penalties else {}
        tensors |= {"branches": self._branches} if trees else {}
        tensors |= {"states": self._states} if self.rule.shared else {}
        # these change only when rows come or go
        steady = frozenset({*self.batch.tensors, "states", "branches"} - {"penalties.generated"})
        return Pure(tensors, self._on, (type(self), self.rule, self.batch.key), steady)

    def _on(self, tensors: Mapping[str, Tensor]) -> "DecodingRound":
        """Return this round as one that reads `tensors`, by the names and with the shapes that `pure` gives."""
        batch = self.batch.on(tensors)
        round = type(self)(batch.rows, self.k, self.rule, self.noise, self.vocabulary, self.device, batch)
        round.lengths = self.lengths
        round.sent = {name: tensors[name] for name in ("start", "tails") if name in tensors}
        round._numbers = tensors["uniforms"]
        if "states" in tensors:
            round._states = tensors["states"]
        if "branches" in tensors:
            round._branches = tensors["branches"]
        return round


def _likeliest(scores: Tensor, probs: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """Return the ids (A, n, m) of the m likeliest children by scores (A, n, V), and their one-hot distributions (A, n,
    m, V). probs (A, n, V): NaN for a node without a distribution, so that its one-hots are NaN too."""
    ids = likeliest(scores, m)
    none = (probs[..., :1] - probs[..., :1]).unsqueeze(2)  # 0, or NaN
    return ids, one_hot(ids, probs.unsqueeze(2).expand(*ids.shape, -1)) + none


def send(device: torch.device, **numbers: Numbers) -> dict[str, Tensor]:
    """Copy whole numbers to the device, all at once, and return them as int64 tensors by name. numbers: for each name a
    list of A numbers, for a tensor (A,), or a list of A lists of n numbers, for a tensor (A, n). On a GPU the copy is
    pinned and asynchronous."""
    flat: list[int] = []
    shapes: list[tuple[int, ...]] = []
    for part in numbers.values():
        if isinstance(part[0], list):
            shapes.append((len(part), len(part[0])))
            for row in part:
                flat += row  # type: ignore[arg-type]
        else:
            shapes.append((len(part),))
            flat += part  # type: ignore[arg-type]
    host = torch.tensor(flat, dtype=torch.int64)
    if device.type != "cpu":
        host = host.pin_memory().to(device, non_blocking=True)
    parts = host.split([shape[0] if len(shape) == 1 else shape[0] * shape[1] for shape in shapes])
    return {name: part.view(shape) for name, part, shape in zip(numbers, parts, shapes, strict=True)}
