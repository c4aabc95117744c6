"""How a model's passes are run: by transformers' own forward, or in few operations where those are known."""

from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inference.models import llama, llama_weights
from inference.models.cache import SlotCache, Window
from inference.models.checksum import fingerprint
from inference.models.grouped_query import folded, folded_mask
from inference.models.output_head import head_of
from inference.models.passes import LAST, MOST_NODES, Branches, Layers, Pass, States
from inference.models.taps import left_behind, tapped

FORMS = ("kinds", "near", "one")  # of mask: one for each kind of layer, one of the window, one of the whole past
Origin = tuple[llama_weights.Places, bytes]
SHORT = 16  # ids a row: longer passes are prefills, bound by arithmetic and not by launches


def most_ids(window: Window) -> int:
    """Ids a row of the passes that are compiled or replayed."""
    return SHORT if window.branches is None else MOST_NODES + 1


class Forward(Protocol):
    """One pass over ids (A, n) at a window's positions; new keys and values go to the cache. scale: see `LM.scale`."""

    scale: Tensor | None

    def forward(self, ids: Tensor, window: Window, only: Tensor | None = None, layers: Layers = ()) -> Pass:
        """Logits (A, n, V), or (A, 1, V) after id `only` (A,) of each row, and the states of `layers`."""

    def store(self, ids: Tensor, window: Window, layers: Layers = ()) -> States:
        """As `forward`, without the head."""

    def hidden(self, ids: Tensor, window: Window, depth: int) -> Tensor:
        """States (A, n, D) behind the first `depth` decoder layers; the others are not run."""

    def keep(self, start: Tensor, path: Tensor) -> None:
        """See `cache.kept`."""

    def head(self, states: Tensor) -> Tensor:
        """States (..., D) behind the final norm -> logits (..., V)."""


class Stock:
    """transformers' own forward. context: positions past it, where only padding stands, are read as its last.

    A window that slides is a narrower mask over the same slots, which hold the whole text: nothing is dropped, so a
    length that goes back finds what it needs. form: of `FORMS`, what the model's code takes (see `selfcheck`).
    """

    scale: Tensor | None = None

    def __init__(self, model: PreTrainedModel, cache: SlotCache, context: int, form: str = "one") -> None:
        self.model, self.cache, self.context, self.form = model, cache, context, form
        config = model.config.get_text_config()
        self.sdpa = config._attn_implementation == "sdpa"
        self.width, self.chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
        self.head = head_of(model)

    def forward(self, ids: Tensor, window: Window, only: Tensor | None = None, layers: Layers = ()) -> Pass:
        if self.scale is not None:
            return self._scaled(ids, window, only, layers)
        with tapped(self.model, layers) as states:
            logits: Tensor = self._call(self.model, ids, window).logits
        return Pass(logits if only is None else picked(logits, only), states)

    def _scaled(self, ids: Tensor, window: Window, only: Tensor | None, layers: Layers) -> Pass:
        states = self.store(ids, window, (*layers, LAST))
        last = states[LAST] if only is None else picked(states[LAST], only)
        return Pass(self.head(scaled(last, self.scale, window.low)), {layer: states[layer] for layer in layers})

    def store(self, ids: Tensor, window: Window, layers: Layers = ()) -> States:
        with tapped(self.model, layers) as states:
            self._call(self.model.base_model, ids, window)
        return states

    def hidden(self, ids: Tensor, window: Window, depth: int) -> Tensor:
        return left_behind(self.model, depth, lambda: self._call(self.model.base_model, ids, window))

    def keep(self, start: Tensor, path: Tensor) -> None:
        self.cache.keep(start, path)

    def _call(self, module: torch.nn.Module, ids: Tensor, window: Window) -> Any:
        window = self._inside(window)
        return module(
            input_ids=ids,
            position_ids=window.positions.clamp(max=self.context - 1),
            attention_mask=self._masks(window, ids.device),
            past_key_values=self.cache,
            use_cache=True,
        )

    def _inside(self, window: Window) -> Window:
        """Slots past the context hold padding alone, but where a tree ends: one is enough, and a table as long as the
        context (MPT's biases) has no more."""
        if window.limit <= self.context + 1 or window.branches is not None:
            return window
        short = Window(window.low, window.high, window.positions.clamp(max=self.context), None, self.context + 1)
        self.cache.aim(short)
        return short

    def _masks(self, window: Window, device: torch.device) -> Tensor | dict[str, Tensor]:
        if self.form == "one":
            return self._mask(visible(window, device))
        near = self._mask(visible(window, device, self.width))
        if self.form == "near":
            return near
        chunked = self._mask(visible(window, device, chunk=self.chunk)) if self.chunk else near
        return {
            "full_attention": self._mask(visible(window, device)),
            "sliding_attention": near,
            "chunked_attention": chunked,
        }

    def _mask(self, seen: Tensor) -> Tensor:
        return seen if self.sdpa else additive(seen, self.model.dtype)


class Lean:
    """`llama.states` of a model for which `llama_weights.applies`. int8: with its projections rounded, see
    `llama_weights.int8`."""

    scale: Tensor | None = None

    def __init__(self, model: PreTrainedModel, cache: SlotCache, int8: bool = False) -> None:
        self.model, self.cache, self.int8 = model, cache, int8
        self._read()

    def forward(self, ids: Tensor, window: Window, only: Tensor | None = None, layers: Layers = ()) -> Pass:
        states = self._states(ids, window, (*layers, LAST))  # before the head is looked up: it may find new weights
        last = states[LAST] if only is None else picked(states[LAST], only)
        last = scaled(last, self.scale, window.low)
        return Pass(self.weights.head(last), {layer: states[layer] for layer in layers})

    def store(self, ids: Tensor, window: Window, layers: Layers = ()) -> States:
        return self._states(ids, window, layers, stored=True)

    def hidden(self, ids: Tensor, window: Window, depth: int) -> Tensor:
        return self._states(ids, window, (depth,))[depth]

    def keep(self, start: Tensor, path: Tensor) -> None:
        self.cache.keep(start, path)

    def head(self, states: Tensor) -> Tensor:
        return self.weights.head(states)

    def draft(
        self, tails: Tensor, ends: Tensor, u: Tensor, temperature: Tensor, greedy: bool, window: Window
    ) -> tuple[Tensor, Tensor] | None:
        """All drafts of a round at once, see `LM.draft`: None where single passes are all there is."""
        return None

    def _states(self, ids: Tensor, window: Window, layers: Layers, stored: bool = False) -> dict[int, Tensor]:
        cos, sin = self.rotation(window)
        return llama.states(ids, self.weights, self.shape, cos, sin, self._keep, self._attend(window), layers, stored)

    def _attend(self, window: Window) -> llama.Attend:
        return attention(self.mask(window), self.shape)

    def _keep(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self.cache.stores[layer].update(keys, values)

    def _read(self) -> None:
        self.weights, self.shape = prepared(self.model, self.int8), llama_weights.shape_of(self.model)
        self.parameters = list(self.model.parameters())
        self.state = llama_weights.state(self.model, self.parameters)  # joining projections may have moved them
        self.origin = made_of(self.model)
        self._turn()

    def _turn(self) -> None:
        with torch.inference_mode(False):  # whoever asks: graphs tell the two kinds of tensors apart
            cos, sin = llama.angles(self.model, self.cache.slots)
            self.angles = cos.to(self.shape.held), sin.to(self.shape.held)

    def rotation(self, window: Window) -> tuple[Tensor, Tensor]:
        """cos and sin (A or 1, n, 1, D) of the window's positions, from a table that grows with the slots."""
        self._refresh(window.limit)
        if window.start is not None:
            cos, sin = (part[None, window.start : window.limit, None] for part in self.angles)
        else:
            cos, sin = (part[window.positions].unsqueeze(2) for part in self.angles)
        return cos, sin

    def _refresh(self, limit: int) -> None:
        """Find weights that have changed, and angles for new slots."""
        if self.state != llama_weights.state(self.model, self.parameters):
            self._read()
        if self.angles[0].shape[0] < limit:
            self._turn()

    def mask(self, window: Window) -> Tensor | None:
        if window.limit - 1 == window.start:
            return None  # one id a row, after everything that is read
        return additive(visible(window, self.model.device), self.shape.held)


# weights as they are multiplied by, of every model that is run, and which ones they were made of; by whether rounded
_PREPARED: WeakKeyDictionary[PreTrainedModel, dict[bool, tuple[Origin, llama.Weights]]] = WeakKeyDictionary()


def made_of(model: PreTrainedModel) -> Origin:
    """What a copy of the model's weights was made of: where they were in memory, and their values, since not every
    change of those is counted."""
    return llama_weights.origin(model), fingerprint(model)


def prepared(model: PreTrainedModel, int8: bool) -> llama.Weights:
    """The model's weights rounded, packed or as they are; copies are made once for all that run it, and again when its
    own have changed."""
    weights, kept = llama_weights.weights_of(model), _PREPARED.setdefault(model, {})
    change = llama_weights.int8 if int8 else llama_weights.packed if llama_weights.can_pack(model) else None
    if change is None:
        return weights
    origin = made_of(model)
    if int8 not in kept or kept[int8][0] != origin:
        kept[int8] = origin, change(weights)
    return kept[int8][1]


def attention(mask: Tensor | None, shape: llama.Shape) -> llama.Attend:
    """The cheapest way to attend under a mask (A, 1, n, L), None: all is seen."""
    if mask is not None and mask.device.type != "cpu":
        return partial(folded, mask=folded_mask(mask, shape.heads // shape.groups), scale=shape.scale)
    if mask is None or mask.shape[2] > SHORT:
        return partial(llama.flash, mask=mask, shape=shape)
    return partial(llama.batched, mask=llama.grouped(mask, shape), shape=shape)


def picked(states: Tensor, only: Tensor) -> Tensor:
    """(A, n, ...) at `only` (A,) -> (A, 1, ...)."""
    return states[torch.arange(len(only), device=only.device), only].unsqueeze(1)


def scaled(states: Tensor, scale: Tensor | None, low: int = 0) -> Tensor:
    """States (A, n, D) of slots low, low + 1, ..., each row's times its own scale, of (rows, D); None: as they are."""
    return states if scale is None else states * scale[low : low + len(states)].unsqueeze(1)


def visible(window: Window, device: torch.device, width: int | None = None, *, chunk: int | None = None) -> Tensor:
    """(A, 1, n, limit): a token sees the slots up to its own position; the last `width` of them, or those of its own
    `chunk` of so many positions, when given."""
    slots = torch.arange(window.limit, device=device)
    if window.branches is not None:
        return seen_on_paths(window.positions, slots, window.branches, width, chunk)
    return seen_from(window.positions, slots, width, chunk)


def seen_from(positions: Tensor, slots: Tensor, width: int | None = None, chunk: int | None = None) -> Tensor:
    """positions (A, n), slots (L,), or the positions (A, 1, L) of what they hold -> (A, 1, n, L), see `visible`."""
    seen = slots <= positions.unsqueeze(-1)
    if width:
        seen &= slots > positions.unsqueeze(-1) - width
    if chunk:
        seen &= slots // chunk == positions.unsqueeze(-1) // chunk
    return seen.unsqueeze(1)


def seen_on_paths(
    positions: Tensor, slots: Tensor, branches: Branches, width: int | None = None, chunk: int | None = None
) -> Tensor:
    """positions (A, n) of nodes, slots (L,) -> (A, 1, n, L): a node sees the text up to the anchor, its ancestors and
    itself. Widths and chunks count positions: along its path, not slots."""
    column = (slots - branches.anchor).clamp(0, MOST_NODES + 1)  # (A, L); the text before the anchor is seen as it is
    seen = (branches.seen.unsqueeze(-1) >> column.unsqueeze(1) & 1).bool().unsqueeze(1)
    if (width or chunk) and branches.depths is not None:
        depths = branches.depths.gather(1, column.clamp(max=branches.depths.shape[1] - 1))
        held = torch.where(column > 0, branches.anchor + depths, slots)  # the position of what each slot holds
        seen &= seen_from(positions, held.unsqueeze(1), width, chunk)
    return seen


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where seen, the lowest number elsewhere: made once, where a bool mask would be converted by every layer."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)
