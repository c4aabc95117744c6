"""Passes of a model, and all drafts of a round, as functions of tensors. They can be recorded as CUDA graphs, see
`replay`.

`Step` is one pass, `_drafted` the drafts of a round. `Replayed` is the forward of a model whose short passes are
replayed. A rows, n ids per row, k or K drafts, S slots per row, L slots that are read, W width, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from inference.models import llama
from inference.models.cache import SlotCache, Window, move_path
from inference.models.forward import (
    Lean,
    additive,
    attention,
    most_ids,
    picked_columns,
    scaled,
    seen_from,
    seen_on_paths,
)
from inference.models.llama import SHORT
from inference.models.markov import Term
from inference.models.passes import LAST, Branches, Layers, Pass
from inference.models.replay import Inputs, Recorded
from inference.sampling import certain
from inference.verify.tree import MOST_NODES, Tree

# logits (A, V) and the earlier drafts (A,) each -> the next drafts (A,) and their distributions (A, V)
Choose = Callable[[Tensor, list[Tensor]], tuple[Tensor, Tensor]]
Drafts = tuple[Tensor, Tensor]  # ids (A, k), and the distributions (A, k, V) that they were drawn from
# (a pass, a round, the inputs, the number of drafts) -> the drafts. The pass maps ids (A, n), the position (A,) of the
# first and perhaps the columns (A, m) that are wanted to logits (A, n or m, V)
Run = Callable[[Callable[..., Tensor], Any, Inputs, int], Drafts]
WIDTHS = (1, 2, 3, 5, 9, SHORT)  # ids a row of a recorded pass: an anchor and 0, 1, 2, 4, 8 drafts, or more
TREE_WIDTHS = (*WIDTHS[:-1], 17, 33, MOST_NODES + 1)  # ids per row of a tree's


def by_round(round: Any, greedy: bool) -> Choose:
    """Return a function that maps logits (A, V) and the earlier drafts to the next drafts (A,) and their distributions
    (A, V), by the round's settings. greedy: whether it takes the likeliest token instead, with a one-hot distribution.
    """

    def choose(logits: Tensor, drafts: list[Tensor]) -> tuple[Tensor, Tensor]:
        probs = round.probs(logits, drafts)
        probs = certain(probs) if greedy else probs
        return round.draw(probs, len(drafts)), probs

    return choose


class Nodes(NamedTuple):
    """The drafts that one pass reads. All have the same depth.

    depth: number of drafts on the path to each node, 1 or more. above (1, n): for each node, the index of its parent
    among the nodes of the previous pass; None if both passes have one node. tree: a tree whose last n nodes are these;
    None for a chain.
    """

    depth: int
    above: Tensor | None = None
    tree: Tree | None = None

    def of_parents(self, values: Tensor) -> Tensor:
        """Return the values (A, n, ...) of these nodes' parents: entry i is for the parent of node i. values (A, m,
        ...): of the m nodes of the previous pass."""
        if self.above is None:
            return values
        return values[torch.arange(len(values), device=values.device).unsqueeze(1), self.above]


# ids (A, n) of nodes -> logits (A, n, V) after them; called level after level
Follow = Callable[[Tensor, Nodes], Tensor]


def one_by_one(
    K: int, logits: Tensor, follow: Follow, choose: Choose, goes_on: Callable[[int], bool] = lambda depth: True
) -> Drafts:
    """Return a chain of up to K drafts, (A, K), made one after the other, and the distributions (A, K, V) that they
    were drawn from.

    logits (A, V): after the texts. follow: maps the last drafts (A, 1) and their `Nodes` to the logits (A, 1, V) after
    them. choose: maps logits (A, V) and the earlier drafts to the next drafts (A,) and their distributions (A, V).
    goes_on: returns whether to draft another token after a depth (0-based); drafting ends when it returns False.
    """
    drafts: list[Tensor] = []
    distributions: list[Tensor] = []
    for depth in range(K):
        if depth and not goes_on(depth - 1):
            break
        last = logits if depth == 0 else follow(drafts[-1].to(logits.device).unsqueeze(1), Nodes(depth))[:, 0]
        ids, probs = choose(last, drafts)
        drafts.append(ids)
        distributions.append(probs)
    return torch.stack(drafts, 1), torch.stack(distributions, 1)


def after_anchor(logits: Tensor, anchor: Tensor, term: Term | None) -> tuple[Tensor, Follow]:
    """For drafts of one pass, return the logits (A, V) of the first drafts, and the function that returns the logits
    (A, n, V) of later ones, from the drafts (A, n) before them and their `Nodes`.

    logits (A, K, V): of the pass; column j is for all drafts at depth j (0-based). anchor (A,): the texts' last tokens.
    term: returns what the preceding token adds to a draft's logits; None if it adds nothing.
    """

    def follow(ids: Tensor, nodes: Nodes) -> Tensor:
        of_depth = logits[:, nodes.depth : nodes.depth + 1]
        return of_depth.expand(-1, ids.shape[1], -1) if term is None else of_depth + term(ids)

    return logits[:, 0] if term is None else logits[:, 0] + term(anchor), follow


def behind(anchors: Tensor, k: int) -> Tensor:
    """Return columns (A, k): each row's column in `anchors` (A,), and the k - 1 columns after it."""
    return anchors.unsqueeze(1) + torch.arange(k, device=anchors.device)


class Step(nn.Module):
    """A pass as a function of tensors. layers: the layers whose states it returns with the logits. weights, shape: of
    the model."""

    def __init__(self, weights: llama.Weights, shape: llama.ModelShape, layers: Layers = ()) -> None:
        super().__init__()
        self.weights, self.shape, self.layers = weights, shape, layers

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
        only: Tensor | None = None,
        anchor: Tensor | None = None,
        nodes: Tensor | None = None,
        seen: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> list[Tensor]:
        """Return a list: logits (A, n, V), or (A, 1 or m, V) for the columns `only` (A,) or (A, m); then the states (A,
        n, W) of each layer.

        ids, positions (A, n). cos, sin (S, D): angles of all positions, D the width of a head. slots (L,): 0 to L - 1,
        the slots to read. keys, values: for each layer, (rows, G, S, D), G heads of keys and values. anchor, nodes,
        seen: the fields anchor, slots and seen of a tree's `Branches`; None for no tree. scale (rows, W): factors of
        the states that the head reads, None for none.
        """
        A, L = ids.shape[0], slots.shape[0]
        written, visible = positions, None
        if anchor is not None and nodes is not None and seen is not None:
            written, visible = nodes, seen_on_paths(positions, slots, Branches(anchor, nodes, seen))
        mask = additive(seen_from(positions, slots) if visible is None else visible, self.shape.held)
        cos, sin = (part[positions].unsqueeze(2) for part in (cos, sin))
        row = torch.arange(A, device=ids.device).unsqueeze(1)

        def keep(layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            for store, new in ((keys[layer], k), (values[layer], v)):
                store.transpose(1, 2).index_put_((row, written), new.transpose(1, 2))
            return keys[layer][:A, :, :L], values[layer][:A, :, :L]

        layers = (*self.layers, LAST)
        every = llama.states_of(ids, self.weights, self.shape, cos, sin, keep, attention(mask, self.shape), layers)
        states = [every[layer] for layer in self.layers]
        last = every[LAST] if only is None else picked_columns(every[LAST], only)
        return [self.weights.head(scaled(last, scale)), *states]


def _drafted(step: Step, run: Run, fit: Callable[[Tensor], Tensor], round: Any, given: Inputs, K: int) -> Drafts:
    """Return K drafts per row (A, K) and their distributions (A, K, V), made as one function of tensors: launching a
    small model's passes one by one would take longer than computing them.

    step: a pass of the model. run: drafts with such passes. fit: converts the model's logits to the round's vocabulary.
    given: the inputs of `run` and the tensors that `Step` reads, by name. round: the `Round` to draft for.
    """
    stored = {name: given[name] for name in ("cos", "sin", "slots", "keys", "values", "scale")}

    def read(ids: Tensor, start: Tensor, only: Tensor | None = None) -> Tensor:
        logits, *_ = step(ids, behind(start, ids.shape[1]), only=only, **stored)
        return fit(logits)

    return run(read, round, given, K)


class Replayed(Lean):
    """The forward of `Lean`, but short passes over the rows [0, rows) are recorded as CUDA graphs. Logits, states,
    drafts and distributions may be views that the next call overwrites. If this fails, passes run as in `Lean`.

    The numbers of rows, ids per row and slots of a recorded pass are rounded up to a few sizes. Recordings read the
    cache's keys and values and the LM's scale. They are dropped when weights change, and before the cache grows, so
    that the old memory can be freed.
    """

    def __init__(self, model: PreTrainedModel, cache: SlotCache, int8: bool, rows: int) -> None:
        self.rows = rows
        self.stored: dict[str, Any] = {}  # what passes read where it is
        self.replay = Recorded(model)
        super().__init__(model, cache, int8)
        cache.before_growth(self._drop)

    def forward(self, ids: Tensor, window: Window, only: Tensor | None = None, layers: Layers = ()) -> Pass:
        results = self._pass(ids, window, only, layers)
        if results is None:
            return super().forward(ids, window, only, layers)
        return Pass(results[0], dict(zip(layers, results[1:], strict=True)))

    def _pass(self, ids: Tensor, window: Window, only: Tensor | None, layers: Layers) -> list[Tensor] | None:
        """Return the results of a `Step` with these layers, or None if the pass is not recorded. ids (A, n).
        only, (A,) or (A, m): the columns whose logits are returned; None for all. window: their positions."""
        if not self._fits(ids, window):
            return None
        inputs, branches = {"ids": ids, "positions": window.positions}, window.branches
        widths = WIDTHS if branches is None else TREE_WIDTHS
        if branches is not None:
            inputs |= {"nodes": branches.slots, "seen": branches.seen, "anchor": branches.anchor}
        inputs |= {} if only is None else {"only": only}
        name, reads = ("pass", layers), self._reads(window.limit)
        return self.replay(name, inputs, lambda: self._step(layers), reads, rows=self.rows, widths=widths)

    def drafts(
        self,
        round: Any,
        name: tuple[Any, ...],
        run: Run,
        given: Inputs,
        ids: Tensor,
        window: Window,
        K: int,
        greedy: bool,
        fit: Callable[[Tensor], Tensor],
    ) -> Drafts | None:
        """Return all K drafts of a round (A, K) and their distributions (A, K, V), or None if they cannot be made in
        one recorded call.

        round: the `Round` to draft for. name: everything that `run` depends on except `given`. run: drafts with passes
        of the model, a function of tensors. given: inputs of `run`, by name. ids (A, n): what the first pass reads.
        window.limit: number of slots of the longest text and its drafts. greedy: whether `run` drafts the likeliest
        tokens. fit: converts the model's logits to the round's vocabulary.
        """
        if not self._fits(ids, window):
            return None

        def make() -> Callable[..., Drafts]:
            return partial(_drafted, self._step(()), run, fit)

        return self.replay.replayed(round, name, given, make, K, self._reads(window.limit), greedy=greedy)

    def keep(self, start: Tensor, path: Tensor) -> None:
        def make() -> Callable[..., Tensor]:
            def run(start: Tensor, path: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
                move_path([*keys, *values], start, path)
                return path

            return run

        reads, inputs = {name: self._reads(1)[name] for name in ("keys", "values")}, {"start": start, "path": path}

        def still() -> Inputs:  # recording runs the move more than once
            return inputs | {"path": torch.full_like(path, -1)}

        if self.replay("keep", inputs, make, reads, rows=self.rows, first=still) is None:
            super().keep(start, path)

    def _fits(self, ids: Tensor, window: Window) -> bool:
        """Return whether a pass over ids (A, n) can be replayed. This first reads changed weights, and computes angles
        for new slots; either drops the recordings. window: their positions."""
        if window.low or ids.shape[1] > most_ids(window) or not self.cache.stores[0].is_initialized:
            return False
        if not self.replay.ready:
            return False
        self.refresh(window.limit)
        return True

    def _step(self, layers: Layers) -> Step:
        return Step(self.weights, self.shape, layers)

    def _reads(self, limit: int) -> dict[str, Any]:
        """Return the tensors that passes read in place, by name: the angles of all positions, the slots to read, keys
        and values, and the scale. limit: number of slots needed."""
        if not self.stored:
            keys, values = self.cache.stored(self.rows)
            cos, sin = self.angles
            self.stored = {"cos": cos, "sin": sin, "keys": keys, "values": values, "scale": self.scale}
            self.numbers = torch.arange(self.cache.slots, device=self.model.device)
        return self.stored | {"slots": self.numbers[: self.replay.slots(limit, self.cache.slots)]}

    def _compute_angles(self) -> None:
        self._drop()  # recordings read the angles and the weights, and both are replaced here
        super()._compute_angles()

    def _drop(self) -> None:
        self.replay.drop()
        self.stored = {}
