"""The ways to run a model's passes: transformers' own forward, or the forward of `llama`, which needs fewer operations.

A rows, n ids per row, L slots read per row (a slot stores one token's keys and values), D width, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from inference.models import llama, packing
from inference.models.cache import SlotCache, Window
from inference.models.checksum import changes, checksum
from inference.models.passes import LAST, Branches, ChainDraws, Layers, Pass, States
from inference.models.pretrained import emulated, head_of, quantisation_of, tapped
from inference.verify.tree import MOST_NODES

# the masks that a model's code accepts: one for each type of layer, one of the window, or one of the whole past
FORMS = ("kinds", "near", "one")
NEAR = 1024  # slots that a long pass reads: with more, torch's own attention takes less time than that of `kernels.cpp`
LANES = 16  # numbers that a CPU's instruction takes at once: that attention is slow for heads of other multiples
Origin = tuple[list[tuple[int, int]], bytes]


def most_ids(window: Window) -> int:
    """Return the largest number of ids per row for which a pass over this window may be recorded."""
    return llama.SHORT if window.branches is None else MOST_NODES + 1


class Forward(Protocol):
    """A way to run one pass over ids (A, n) at a window's positions. New keys and values go to the cache. scale (rows,
    D): factors of the states that the head reads, None for none."""

    scale: Tensor | None

    def forward(self, ids: Tensor, window: Window, only: Tensor | None = None, layers: Layers = ()) -> Pass:
        """Return the logits (A, n, V), and the states of `layers`. only (A,): a column of each row; the logits are then
        (A, 1, V), after this column. None for all columns. ids (A, n): at the positions of `window`."""

    def store(self, ids: Tensor, window: Window, layers: Layers = ()) -> States:
        """Run the pass without the head, to store keys and values. Return the states of `layers`. ids (A, n): at the
        positions of `window`."""

    def keep(self, start: Tensor, path: Tensor) -> None:
        """Move the keys and values of a tree's accepted path to the slots after its anchor. start (A,): the slots of
        the anchors. path (A, m): the accepted nodes of each row's tree, then -1."""

    def head(self, states: Tensor) -> Tensor:
        """Return logits (..., V). states (..., D): after the final norm."""


class Stock:
    """The forward of transformers. context: number of positions; later ones have only padding, so they are read as the
    last one.

    A sliding window is a narrower attention mask over the same slots. These contain the whole text, so a text can be
    cut back to any length. form: the entry of `FORMS` that the model's code accepts (see `selfcheck`). cache: for the
    keys and values.
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
        return Pass(logits if only is None else picked_columns(logits, only), states)

    def _scaled(self, ids: Tensor, window: Window, only: Tensor | None, layers: Layers) -> Pass:
        states = self.store(ids, window, (*layers, LAST))
        last = states[LAST] if only is None else picked_columns(states[LAST], only)
        return Pass(self.head(scaled(last, self.scale, window.low)), {layer: states[layer] for layer in layers})

    def store(self, ids: Tensor, window: Window, layers: Layers = ()) -> States:
        with tapped(self.model, layers) as states:
            self._call(self.model.base_model, ids, window)
        return states

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
        """Return a window that reads at most one slot past the context. Later slots have only padding, and a table as
        long as the context (MPT's biases) has no entries for them. The window of a tree, which may need these slots, is
        returned unchanged."""
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
    """The forward of `llama.states_of`, for a model that `llama.applies` accepts. int8: whether copies of projections
    are rounded: as `llama.int8` does for a model that is in 8 bits, else as `llama.drafting` does. cache: for the keys
    and values. The attribute `change` adds second copies of the weights; None: there are none."""

    scale: Tensor | None = None

    def __init__(self, model: PreTrainedModel, cache: SlotCache, int8: bool = False) -> None:
        self.model, self.cache = model, cache
        fewer = llama.int8 if quantisation_of(model.config) == llama.INT8_ROWS else llama.drafting
        self.change = fewer if int8 else llama.packed if packing.can_pack(model) else None
        self._read_weights()
        if not llama.are_packed(self.weights):
            self.change = None  # for good: `LM.stamp` depends on it

    def forward(self, ids: Tensor, window: Window, only: Tensor | None = None, layers: Layers = ()) -> Pass:
        states = self._states(ids, window, (*layers, LAST))  # before the head is read: this may replace the weights
        last = states[LAST] if only is None else picked_columns(states[LAST], only)
        last = scaled(last, self.scale, window.low)
        return Pass(self.weights.head(last), {layer: states[layer] for layer in layers})

    def store(self, ids: Tensor, window: Window, layers: Layers = ()) -> States:
        states = self._states(ids, window, layers, stored=True)
        return {layer: part.to(self.dtype) for layer, part in states.items()}

    def keep(self, start: Tensor, path: Tensor) -> None:
        self.cache.keep(start, path)

    def head(self, states: Tensor) -> Tensor:
        return self.weights.head(states)

    def _states(self, ids: Tensor, window: Window, layers: Layers, stored: bool = False) -> dict[int, Tensor]:
        cos, sin = self.rotation(window)
        short = ids.shape[1] <= most_ids(window)
        if self.flat is not None and (short or self.long and window.limit <= NEAR):
            x = F.embedding(ids, self.weights.embedding).to(self.dtype)
            self.cache.allocate(self.shape.groups, self.shape.size, x)
            stores, where = self.cache.stores, (window.slots, self.mask(window), window.limit, window.low)
            held = [store.keys for store in stores], [store.values for store in stores]
            return llama.in_kernel(x, self.flat, self.shape, (cos, sin), held, *where, layers)
        attend = attention(self.mask(window), self.shape)
        weights = self.prompts if stored and not short else self.weights
        return llama.states_of(ids, weights, self.shape, cos, sin, self._keep, attend, layers)

    @property
    def chains(self) -> bool:
        """Return whether one operator of `kernels.cpp` can draft a chain: layers and head have packed copies."""
        head = self.weights.head
        packed = self.flat is not None and isinstance(head, llama.Linear) and head.packed is not None
        return packed and self.scale is None

    def chain(
        self, ids: Tensor, start: Tensor, only: Tensor, draws: ChainDraws, K: int, limit: int
    ) -> tuple[Tensor, Tensor] | None:
        """Return K drafts per row and their distributions, by one operator; None without `chains`. ids (A, n): what the
        first pass reads, from position start[a] (A,) on; the first draft follows its column only[a] (A,). limit: the
        number of slots that all passes read."""
        self.refresh(limit)
        if not self.chains:
            return None
        head: Any = self.weights.head
        none = self.angles[0].new_empty(0)
        self.cache.allocate(self.shape.groups, self.shape.size, none)
        keys, values = self.cache.stored(len(ids))
        drafts: tuple[Tensor, Tensor] = torch.ops.inference.chain(
            *(ids, none, start, only, self.weights.embedding, none, self.flat, keys, values, *self.angles),
            *(head.packed.weight, head.packed.exact, none.long(), *draws),
            *(K, limit, head.packed.outputs, *llama.of_shape(self.shape)),
        )
        return drafts

    def _keep(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self.cache.stores[layer].update(keys, values)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the states."""
        return self.weights.norm.dtype

    def _read_weights(self) -> None:
        self.weights, self.shape = prepared(self.model, self.change), llama.shape_of(self.model)
        self.flat = llama.of_kernel(self.weights.layers, self.weights.norm)
        # many ids take less time by products in half precision than in float32: by those of `kernels.cpp` if they round
        # (not with AMX, for which the CPU's own are made), else by the CPU's own
        own = self.change is llama.packed and self.dtype != self.model.dtype and not emulated(self.model.dtype)
        fit = self.shape.size % LANES == 0 and not torch.cpu._is_amx_tile_supported()
        self.long = own and fit and packing.rounds(self.model.dtype)
        self.prompts = prepared(self.model, None) if own else self.weights
        self.parameters = list(self.model.parameters())
        self.state = llama.state(self.model, self.parameters)  # joining projections may have moved them
        self._compute_angles()

    def _compute_angles(self) -> None:
        cos, sin = llama.angles(self.model, self.cache.slots, self.weights.norm)
        self.angles = cos.to(self.shape.held), sin.to(self.shape.held)

    def rotation(self, window: Window) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each (A or 1, n, 1, head size), of the rotary angles at the window's positions. They come
        from a table that grows with the slots."""
        self.refresh(window.limit)
        if window.start is not None:
            cos, sin = (part[None, window.start : window.limit, None] for part in self.angles)
        else:
            cos, sin = (part[window.positions].unsqueeze(2) for part in self.angles)
        return cos, sin

    def refresh(self, limit: int) -> None:
        """Read the weights again if they have changed. Compute the table of angles again if it has fewer than `limit`
        positions."""
        if self.state != llama.state(self.model, self.parameters):
            self._read_weights()
        if self.angles[0].shape[0] < limit:
            self._compute_angles()

    def mask(self, window: Window) -> Tensor | None:
        """Return the attention mask (A, 1, n, L) that is added to the scores, or None if every id sees all slots that
        are read."""
        if window.limit - 1 == window.start:
            return None  # one id per row, which sees all slots that are read
        return additive(visible(window, self.model.device), self.shape.held)


Change = Callable[[llama.Weights], llama.Weights]
# rounded or packed copies of weights, with the origin of the values; by model and by what made them
_PREPARED: WeakKeyDictionary[PreTrainedModel, dict[Change, tuple[Origin, llama.Weights]]] = WeakKeyDictionary()


def origin_of(model: PreTrainedModel) -> Origin:
    """Return the address and change counter of every weight, and a checksum of the values. The checksum is needed
    because torch does not count every change."""
    return [(p.data_ptr(), changes([p])) for p in model.parameters()], checksum(model)


def prepared(model: PreTrainedModel, change: Change | None) -> llama.Weights:
    """Return the model's weights after `change`, which makes rounded or packed copies; None for the weights themselves.
    Copies are computed once for all users of the model, and again when its weights have changed."""
    weights, copies = llama.weights_of(model), _PREPARED.setdefault(model, {})
    if change is None:
        return weights
    origin = origin_of(model)
    if change not in copies or copies[change][0] != origin:
        copies[change] = origin, change(weights)
    return copies[change][1]


def attention(mask: Tensor | None, shape: llama.ModelShape) -> llama.Attend:
    """Return the attention function that is fastest for a mask: from queries (A, H, n, D) and keys and values (A, G, L,
    D) to (A, n, H D). mask (A, 1, n, L): added to the scores; None if every token sees all slots. shape: of the model.
    """
    if mask is not None and mask.device.type != "cpu":
        return partial(llama.folded, mask=llama.folded_mask(mask, shape.heads // shape.groups), scale=shape.scale)
    if mask is None or mask.shape[2] > llama.SHORT:
        return partial(llama.flash, mask=mask, shape=shape)
    return partial(llama.batched, mask=llama.grouped(mask, shape), shape=shape)


def picked_columns(states: Tensor, only: Tensor) -> Tensor:
    """Return some columns of each row's states: (A, 1, ...) for `only` (A,), (A, m, ...) for `only` (A, m). states (A,
    n, ...). only: indices of columns (0-based)."""
    only = only.view(len(only), -1)
    return states[torch.arange(len(only), device=only.device).unsqueeze(1), only]


def scaled(states: Tensor, scale: Tensor | None, low: int = 0) -> Tensor:
    """Return states (A, n, D) times the scale of their rows. scale (rows, D): row low + a is for states[a]; None
    returns the states unchanged. low: the cache row of states[0]."""
    return states if scale is None else states * scale[low : low + len(states)].unsqueeze(1)


def visible(window: Window, device: torch.device, width: int | None = None, *, chunk: int | None = None) -> Tensor:
    """Return a bool tensor (A, 1, n, limit): the slots that each token sees, up to its own position. width: if given,
    only the last `width` of these (a sliding window). chunk: if given, only those in the same chunk of `chunk`
    positions. window: the positions (A, n) of the tokens, and the number of slots. device: of the result."""
    slots = torch.arange(window.limit, device=device)
    if window.branches is not None:
        return seen_on_paths(window.positions, slots, window.branches, width, chunk)
    return seen_from(window.positions, slots, width, chunk)


def seen_from(positions: Tensor, slots: Tensor, width: int | None = None, chunk: int | None = None) -> Tensor:
    """Return a bool tensor (A, 1, n, L): the slots that tokens at positions (A, n) see, up to their own position.
    slots, (L,) or (A, 1, L): the position of the token in each slot. width: if given, only the last `width` positions.
    chunk: if given, only positions in the same chunk of `chunk` positions."""
    seen = slots <= positions.unsqueeze(-1)
    if width:
        seen &= slots > positions.unsqueeze(-1) - width
    if chunk:
        seen &= slots // chunk == positions.unsqueeze(-1) // chunk
    return seen.unsqueeze(1)


def seen_on_paths(
    positions: Tensor, slots: Tensor, branches: Branches, width: int | None = None, chunk: int | None = None
) -> Tensor:
    """Return a bool tensor (A, 1, n, L): the slots that the nodes of a tree see, which are the text up to the anchor
    (the text's last token), their ancestors and themselves. positions (A, n): of the nodes. slots (L,): the numbers of
    the slots. width, chunk: if given, only the last `width` positions or those in the same chunk, counted along a
    node's path, not in slots; they have an effect only if `branches.depths` is given."""
    column = _columns(slots, branches)
    seen = (branches.seen.unsqueeze(-1) >> column.unsqueeze(1) & 1).bool().unsqueeze(1)
    if (width or chunk) and branches.depths is not None:
        seen &= seen_from(positions, positions_on_paths(slots, branches), width, chunk)
    return seen


def positions_on_paths(slots: Tensor, branches: Branches) -> Tensor:
    """Return the positions (A, 1, L) of the tokens in slots (L,), for a pass over a tree. slots: the numbers of the
    slots. `branches.depths` must not be None."""
    assert branches.depths is not None
    column = _columns(slots, branches)
    depths = branches.depths.gather(1, column.clamp(max=branches.depths.shape[1] - 1))
    return torch.where(column > 0, branches.anchor + depths, slots).unsqueeze(1)


def _columns(slots: Tensor, branches: Branches) -> Tensor:
    """Return the tree's column in each slot, (A, L); 0 for slots of the text up to the anchor. slots (L,): the numbers
    of the slots."""
    return (slots - branches.anchor).clamp(0, MOST_NODES + 1)


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an attention mask in the shape of `seen` (bool), to be added to scores: 0 where `seen` is True, else the
    lowest number of the dtype. It is computed once per pass; from a bool mask, every layer would compute it again."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)
