"""Passes of a model, and all drafts of a round, as functions of tensors, to be compiled or captured."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from inference.models import llama
from inference.models.forward import additive, attention, picked, scaled, seen_from, seen_on_paths
from inference.models.passes import LAST, Branches, Layers
from inference.sampling import certain, draw, one_hot, probs_at, wide

if TYPE_CHECKING:
    from inference.proposers.base import Round

# logits (A, V) and the drafts (A,) before -> the next ones (A,) and the distribution (A, V) that they were drawn from
Choose = Callable[[Tensor, list[Tensor]], tuple[Tensor, Tensor]]


def by_round(round: "Round", greedy: bool) -> Choose:
    """Drafts by the round's own distributions and draws, whatever its settings; greedy: the likeliest tokens, one-hot
    distributions."""

    def choose(logits: Tensor, drafts: list[Tensor]) -> tuple[Tensor, Tensor]:
        probs = round.probs(logits, drafts)
        probs = certain(probs) if greedy else probs
        return round.draw(probs, len(drafts)), probs

    return choose


class Step(nn.Module):
    """A pass as a function of tensors; the weights are its parameters. layers: whose states it gives; without the head,
    no decoder layer is run behind the last of them."""

    def __init__(self, weights: llama.Weights, shape: llama.Shape, layers: Layers = (), head: bool = True) -> None:
        super().__init__()
        self.shape, self.layers, self.head, self.count = shape, layers, head, 0
        self.weights = self._registered(weights)

    def _registered(self, value: Any) -> Any:
        """The same structure, each tensor a parameter."""
        if isinstance(value, Tensor):
            self.count += 1
            self.register_parameter(f"weight{self.count}", nn.Parameter(value, requires_grad=False))
            return f"weight{self.count}"
        if isinstance(value, list):
            return [self._registered(item) for item in value]
        return value if value is None else type(value)(*map(self._registered, value))

    def _tensors(self, value: Any) -> Any:
        if isinstance(value, str):
            return getattr(self, value)
        if isinstance(value, list):
            return [self._tensors(item) for item in value]
        return value if value is None else type(value)(*[self._tensors(item) for item in value])

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
        """ids, positions (A, n); cos, sin (S, D) of all positions; slots (L,): 0 .. L - 1, those that are read; keys,
        values (rows, G, S, D) a layer -> logits (A, n, V), or (A, 1, V) of `only` (A,), and states (A, n, W).
        branches: of a tree's columns. scale (rows, D): of what the head reads, see `LM.scale`."""
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
        found = llama.states(ids, weights, self.shape, cos, sin, keep, attention(mask, self.shape), layers)
        states = [found[layer] for layer in self.layers]
        if not self.head:
            return states
        last = found[LAST] if only is None else picked(found[LAST], only)
        return [weights.head(scaled(last, scale)), *states]


class Drafting(Step):
    """All drafts of a round: `k` passes of a draft with its distributions and draws between them. Step by step, a small
    draft takes longer to launch than to compute. greedy: the likeliest token each time, its distribution one-hot."""

    def __init__(self, weights: llama.Weights, shape: llama.Shape, k: int, greedy: bool = False) -> None:
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
    ) -> tuple[Tensor, Tensor]:
        """tails (A, n): the last ids of texts of `ends` (A,) tokens, whose ids before those are stored; u (A, k)
        uniforms; temperature (A,) above 0; the rest as for a pass -> drafts (A, k) and the distributions (A, k, V) that
        they were drawn from."""

        def chosen(logits: Tensor, drafts: list[Tensor]) -> tuple[Tensor, Tensor]:
            if self.greedy:
                ids = logits.argmax(-1)
                return ids, one_hot(ids, logits)
            probs = probs_at(logits, temperature)
            return draw(probs, u[:, len(drafts)]), probs

        return self.chosen(chosen, tails, ends, scale, cos, sin, slots, keys, values)

    def chosen(
        self,
        choose: Callable[[Tensor, list[Tensor]], tuple[Tensor, Tensor]],
        tails: Tensor,
        ends: Tensor,
        scale: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """As `forward`; choose: logits (A, V), float32 at least, and the drafts (A,) before -> the next ones (A,) and
        the distribution (A, V) that they were drawn from."""

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
