"""Passes of a model, and all drafts of a round, as functions of tensors. They can be compiled or recorded as CUDA
graphs.

`Step` is one pass. `Drafting` makes the drafts of a round one after the other. `OnePass` makes them all in one pass. A
rows, n ids per row, k drafts, V vocabulary.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from inference.models import llama
from inference.models.forward import additive, attention, picked, scaled, seen_from, seen_on_paths
from inference.models.markov import Term
from inference.models.passes import LAST, Branches, Layers
from inference.sampling import certain, draw, one_hot, probs_at, wide

# logits (A, V) and the earlier drafts (A,) each -> the next drafts (A,) and their distributions (A, V)
Choose = Callable[[Tensor, list[Tensor]], tuple[Tensor, Tensor]]
Drafts = tuple[Tensor, Tensor]  # ids (A, k), and the distributions (A, k, V) that they were drawn from


class Draws(Protocol):
    """The part of a decoding round that models use. It has distributions and draws, and the tensors that these read."""

    def probs(self, logits: Tensor, drafted: list[Tensor], /) -> Tensor:
        """Return the distributions (A, V) under each row's sampling settings. logits (A, V): after `drafted`, ids (A,)
        per draft."""

    def draw(self, probs: Tensor, depth: int, /) -> Tensor:
        """Return ids (A,) drawn from distributions (A, V) with the noise of this depth (0-based)."""

    def by_temperature(self, greedy: bool, /) -> bool | None:
        """Return whether all drafts are the likeliest tokens, or all are drawn by a temperature alone; None if neither.
        greedy: the likeliest tokens are drafted, whatever the settings are."""

    def uniforms(self, depths: int, /) -> tuple[Tensor, Tensor]:
        """Return the uniforms (A, depths) and temperatures (A,), on the device."""

    def replayed(
        self, graphs: Any, name: tuple[Any, ...], given: Mapping[str, Tensor], make: Callable[[], Any], /
    ) -> Any:
        """Return what run(draws, given) returns, from a graph, or None if there is none. make: returns `run`, for a new
        graph. name: everything that it depends on but tensors."""


def by_round(draws: Draws, greedy: bool) -> Choose:
    """Return a function that makes each draft by the round's own distributions and draws, under any settings. greedy:
    it makes the likeliest token, with a one-hot distribution."""

    def choose(logits: Tensor, drafts: list[Tensor]) -> tuple[Tensor, Tensor]:
        probs = draws.probs(logits, drafts)
        probs = certain(probs) if greedy else probs
        return draws.draw(probs, len(drafts)), probs

    return choose


def by_temperature(u: Tensor, temperature: Tensor, greedy: bool) -> Choose:
    """Return a function that makes drafts by a temperature alone. temperature (A,): above 0. u (A, k): uniforms.
    greedy: it makes the likeliest tokens, with one-hot distributions."""

    def choose(logits: Tensor, drafts: list[Tensor]) -> tuple[Tensor, Tensor]:
        if greedy:
            ids = logits.argmax(-1)
            return ids, one_hot(ids, logits)
        probs = probs_at(logits, temperature)
        return draw(probs, u[:, len(drafts)]), probs

    return choose


class Step(nn.Module):
    """A pass as a function of tensors. The weights are its parameters. layers: the layers whose states it returns.
    Without the head, later decoder layers do not run."""

    def __init__(self, weights: llama.Weights, shape: llama.ModelShape, layers: Layers = (), head: bool = True) -> None:
        super().__init__()
        self.shape, self.layers, self.head, self.count = shape, layers, head, 0
        self.weights = self._registered(weights)

    def _registered(self, value: Any) -> Any:
        """Return the same structure, with each tensor replaced by the name of a new parameter. None, numbers and
        packed copies stay unchanged."""
        if isinstance(value, Tensor):
            self.count += 1
            self.register_parameter(f"weight{self.count}", nn.Parameter(value, requires_grad=False))
            return f"weight{self.count}"
        if isinstance(value, list):
            return [self._registered(item) for item in value]
        return type(value)(*map(self._registered, value)) if isinstance(value, tuple) else value

    def _tensors(self, value: Any) -> Any:
        if isinstance(value, str):
            return getattr(self, value)
        if isinstance(value, list):
            return [self._tensors(item) for item in value]
        return type(value)(*[self._tensors(item) for item in value]) if isinstance(value, tuple) else value

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
        branches: Branches | None = None,
        scale: Tensor | None = None,
    ) -> list[Tensor]:
        """Return logits (A, n, V), or (A, 1, V) of `only` (A,), and states (A, n, W) of the layers.

        ids, positions (A, n). cos, sin (S, D): of all positions. slots (L,): 0 .. L - 1, the slots to read. keys,
        values (rows, G, S, D): per layer. branches: of a tree's columns. scale (rows, D): of the states that the head
        reads, see `LM`.
        """
        A, L = ids.shape[0], slots.shape[0]
        seen = seen_from(positions, slots) if branches is None else seen_on_paths(positions, slots, branches)
        mask, written = additive(seen, self.shape.held), positions if branches is None else branches.slots
        cos, sin = (part[positions].unsqueeze(2) for part in (cos, sin))
        row = torch.arange(A, device=ids.device).unsqueeze(1)
        weights = self._tensors(self.weights)

        def keep(layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            for store, new in ((keys[layer], k), (values[layer], v)):
                store.transpose(1, 2).index_put_((row, written), new.transpose(1, 2))
            return keys[layer][:A, :, :L], values[layer][:A, :, :L]

        layers = (*self.layers, LAST) if self.head else self.layers
        every = llama.states_of(ids, weights, self.shape, cos, sin, keep, attention(mask, self.shape), layers)
        states = [every[layer] for layer in self.layers]
        if not self.head:
            return states
        last = every[LAST] if only is None else picked(every[LAST], only)
        return [weights.head(scaled(last, scale)), *states]


class Drafting(Step):
    """All drafts of a round as one function: `k` passes of a draft model with the distributions and draws between them.
    Separate launches of a small model would take longer than its computation. greedy: draft the likeliest token each
    time, with a one-hot distribution."""

    def __init__(self, weights: llama.Weights, shape: llama.ModelShape, k: int, greedy: bool = False) -> None:
        super().__init__(weights, shape)
        self.k, self.greedy = k, greedy

    def forward(  # type: ignore[override]
        self,
        tails: Tensor,
        ends: Tensor,
        u: Tensor,
        temperature: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
        scale: Tensor | None = None,
    ) -> Drafts:
        """Return the drafts of a round. tails (A, n): the last ids of texts of `ends` (A,) tokens, whose earlier ids
        are stored. u (A, k): uniforms. temperature (A,): above 0. Other arguments as for a pass."""
        choose = by_temperature(u, temperature, self.greedy)
        return self.drafts(choose, tails, ends, scale, cos, sin, slots, keys, values)

    def drafts(
        self,
        choose: Choose,
        tails: Tensor,
        ends: Tensor,
        scale: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> Drafts:
        """Return the drafts of a round, each made by `choose`, which reads logits in float32 or wider. Other arguments
        as in `forward`."""

        def after(ids: Tensor, start: Tensor) -> Tensor:
            positions = start.unsqueeze(1) + torch.arange(ids.shape[1], device=ids.device)
            logits, *_ = super(Drafting, self).forward(ids, positions, cos, sin, slots, keys, values, scale=scale)
            return wide(logits[:, -1])

        drafts: list[Tensor] = []
        distributions: list[Tensor] = []
        logits = after(tails, ends - tails.shape[1])
        for depth in range(self.k):
            ids, probs = choose(logits, drafts)
            drafts.append(ids)
            distributions.append(probs)
            if depth + 1 < self.k:
                logits = after(drafts[-1].unsqueeze(1), ends + depth)
        return torch.stack(drafts, 1), torch.stack(distributions, 1)


class Masked(NamedTuple):
    """The inputs of a pass over masks. ids (A, n): the ids of the text that a slot lacks, then masks. begins (A,): the
    position of the first id. anchors (A,): the column of the text's last token."""

    ids: Tensor
    begins: Tensor
    anchors: Tensor

    @property
    def last(self) -> Tensor:
        """Return the texts' last tokens (A,)."""
        return self.ids.gather(1, self.anchors.unsqueeze(1)).squeeze(1)


class OnePass(Step):
    """All drafts of a round in one pass, by temperature alone. It uses the distributions at the anchor and at the masks
    after it. greedy: draft the likeliest tokens, with one-hot distributions. term: as in `in_order`."""

    def __init__(
        self, weights: llama.Weights, shape: llama.ModelShape, k: int, greedy: bool = False, term: Term | None = None
    ) -> None:
        super().__init__(weights, shape, (LAST,), head=False)
        self.k, self.greedy, self.term = k, greedy, term

    def forward(  # type: ignore[override]
        self, ids: Tensor, begins: Tensor, anchors: Tensor, u: Tensor, temperature: Tensor, *stored: Any
    ) -> Drafts:
        """Return the drafts of a round. ids, begins, anchors: see `Masked`. u (A, k): uniforms. temperature (A,): above
        0. stored: angles, slots, keys and values, as for a pass."""
        masked = Masked(ids, begins, anchors)
        logits = self.logits(masked, *stored)
        if self.term is not None:
            return in_order(by_temperature(u, temperature, self.greedy), logits, masked.last, self.term)
        if self.greedy:
            likeliest = logits.argmax(-1)
            return likeliest, one_hot(likeliest, logits)
        distributions = probs_at(logits, temperature)
        return draw(distributions, u), distributions

    def logits(self, masked: Masked, *stored: Any) -> Tensor:
        """Return the logits (A, k, V) at the anchor and the k - 1 masks after it, float32 at least."""
        positions = masked.begins.unsqueeze(1) + torch.arange(masked.ids.shape[1], device=masked.ids.device)
        (states,) = super().forward(masked.ids, positions, *stored)
        return wide(self._tensors(self.weights).head(behind(states, masked.anchors, self.k)))


def behind(values: Tensor, anchors: Tensor, k: int) -> Tensor:
    """Return the values (A, n, ...) in the column of the anchor (A,) and the k - 1 columns after it -> (A, k, ...)."""
    columns = anchors.unsqueeze(1) + torch.arange(k, device=anchors.device)
    return values[torch.arange(len(anchors), device=anchors.device).unsqueeze(1), columns]


def in_order(choose: Choose, logits: Tensor, anchor: Tensor, term: Term | None = None) -> Drafts:
    """Return drafts made one after the other, from logits (A, k, V) of one pass. anchor (A,): the tokens before the
    first drafts. term: adds a term for the token before each draft to its logits; None if no draft changes the logits
    of another. Settings that read history may make a distribution depend on earlier drafts."""
    drafts: list[Tensor] = []
    distributions: list[Tensor] = []
    for one in logits.unbind(1):
        before = drafts[-1].to(one.device) if drafts else anchor
        ids, probs = choose(one if term is None else one + term(before), drafts)
        drafts.append(ids)
        distributions.append(probs)
    return torch.stack(drafts, 1), torch.stack(distributions, 1)
