"""The KV cache. It has one row per text. Each row has static slots, one for each token of the text. This module also
computes the cache's size in bytes.

Callers pass the length of each text. A pass writes new keys and values at each row's positions. Slots past a row's
length are masked and later overwritten, so a smaller length is enough to roll back a chain; nothing is copied. Active
rows are [0, A) without a gap, so a pass over them reads plain views.

The slot of a text's token is the token's position. Each node of a tree of drafts has its own slot, although siblings
have the same position; `keep` then moves the accepted path to the slots of its positions.

A rows of a pass, n ids per row, G heads of keys and values, S slots per row, D width of a head.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from inference.models.passes import Branches
from inference.models.pretrained import layers_of, longest_text
from inference.verify.tree import Tree

FIRST_SLOTS = 256  # of a row, until its text needs more
MOST_SPARE = 8  # slots in which stored prompts wait


@dataclass
class Window:
    """The part of the cache that one pass writes and reads. low, high: the pass has the rows [low, high). positions (A,
    n): each id's position in its text (0-based). start: the first position if all rows have the same one, else None.
    limit: the pass reads the slots [0, limit). branches: the columns of a tree; None if each token's slot is its
    position."""

    low: int
    high: int
    positions: Tensor
    start: int | None
    limit: int
    branches: Branches | None = None
    _indices: dict[tuple[int, int, torch.device], Tensor] = field(default_factory=dict, repr=False)

    @property
    def slots(self) -> Tensor:
        """Return the slots (A, n) of the cache that the pass's keys and values are written to; column j for id j."""
        return self.positions if self.branches is None else self.branches.slots

    def indices(self, store: Tensor) -> Tensor:
        """Return the flat indices (A * G * n,) of the new tokens in `store` (rows, G, S, D) without its last dimension.
        They are computed once per pass and device: a model's layers may be on several devices."""
        _, heads, slots, _ = store.shape
        indices = self._indices.get((heads, slots, store.device))
        if indices is None:
            row = torch.arange(self.low, self.high, device=self.positions.device)[:, None, None] * heads
            head = torch.arange(heads, device=self.positions.device)[:, None]
            indices = ((row + head) * slots + self.slots.unsqueeze(1)).flatten().to(store.device)
            self._indices[heads, slots, store.device] = indices
        return indices


def tree_window(tree: Tree, n: int, anchor: Tensor, longest: int, low: int = 0) -> Window:
    """Return the window of the last n columns of a tree; column 0 is the anchor, the text's last token, and column i +
    1 node i. anchor (A,): the anchors' slots. longest: the largest of these. low: the first of the A rows."""
    rows, anchor, first = len(anchor), anchor.unsqueeze(1), tree.nodes + 1 - n
    slots = anchor + torch.arange(first, tree.nodes + 1, device=anchor.device)
    seen, depths = (part.expand(rows, -1) for part in (tree.seen, tree.depths))
    branches = Branches(anchor, slots, seen[:, first:], depths)
    return Window(low, low + rows, anchor + depths[:, first:], None, longest + 1 + tree.nodes, branches)


class SlotLayer(CacheLayerMixin):
    """The keys and values of one layer, each (rows, G, slots, D), allocated at the first pass. window: what the present
    pass writes and reads."""

    keys: Tensor
    values: Tensor
    is_sliding = False
    is_compileable = True

    def __init__(self, rows: int, slots: int) -> None:
        super().__init__()
        self.rows, self.slots = rows, slots
        self.window: Window | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (
            states.new_zeros(self.rows, states.shape[1], self.slots, states.shape[3])  # masked values must be finite
            for states in (key_states, value_states)
        )
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write key_states and value_states (A, G, n, D) to the window's slots. Return views (A, G, limit, D) of the
        keys and values that the pass reads."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        window = self.window
        assert window is not None, "SlotLayer.update outside LM.forward"
        return _write(self.keys, key_states, window), _write(self.values, value_states, window)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self.window.limit if self.window else self.slots), 0

    def get_seq_length(self) -> int:
        return self.window.start or 0 if self.window else 0

    def get_max_length(self) -> int:
        return self.slots

    get_max_cache_shape = get_max_length  # its name before transformers 5.20

    def move(self, source: int, target: int, length: int) -> None:
        if self.is_initialized:
            self.keys[target, :, :length] = self.keys[source, :, :length]
            self.values[target, :, :length] = self.values[source, :, :length]

    def grow(self, slots: int) -> None:
        if self.is_initialized:
            self.keys = grown(self.keys, slots)  # one after the other: the old keys are freed first
            self.values = grown(self.values, slots)
        self.slots = slots


def grown(store: Tensor, slots: int) -> Tensor:
    rows, heads, width, size = store.shape
    new = store.new_zeros(rows, heads, slots, size)
    new[:, :, :width] = store
    return new


def _write(store: Tensor, states: Tensor, window: Window) -> Tensor:
    store.flatten(0, 2).index_copy_(0, window.indices(store), states.flatten(0, 2))
    return store[window.low : window.high, :, : window.limit]


class SlotCache(Cache):
    """A cache with one `SlotLayer` per decoder layer. All layers share the window of the present pass.

    slots: number of slots per row at first. context: the largest number of tokens per row, None for no bound. Only
    drafts use slots past the context.
    """

    def __init__(self, layers: int, rows: int, slots: int, context: int | None = None) -> None:
        self.stores = [SlotLayer(rows, slots) for _ in range(layers)]
        super().__init__(layers=[*self.stores])
        self.slots, self.context = slots, context
        self.listeners: list[WeakMethod[Callable[[], None]]] = []

    def before_growth(self, listener: Callable[[], None]) -> None:
        """Register a bound method that is called before slots are added. The method should drop its references to keys
        and values, since new tensors replace them. It is referenced weakly, since its object refers to this cache.
        listener: the method."""
        self.listeners.append(WeakMethod(listener))

    def aim(self, window: Window) -> None:
        """Set the window of the next pass. Slots are added first if the pass reads more than there are."""
        if window.limit > self.slots:
            for listener in self.listeners:
                if (forget := listener()) is not None:
                    forget()
            self.slots = self._slots_for(window)
            for layer in self.stores:
                layer.grow(self.slots)
        for layer in self.stores:
            layer.window = window

    def _slots_for(self, window: Window) -> int:
        """Return the new number of slots per row: twice the old number, but at most the context. If the window ends
        past the context, return the context plus room for this pass's drafts."""
        if self.context is None:
            return max(window.limit, 2 * self.slots)
        if window.limit <= self.context:
            return min(max(window.limit, 2 * self.slots), self.context)
        return max(window.limit, self.context + window.positions.shape[1])

    def allocate(self, groups: int, size: int, like: Tensor) -> None:
        """Allocate the keys and values of every layer that no pass has written yet, in the mode of the passes. groups:
        G. size: D. like: a tensor of their dtype and device."""
        for store in self.stores:
            if not store.is_initialized:
                states = like.new_empty(1, groups, 0, size)
                store.lazy_initialization(states, states)

    def stored(self, high: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return the keys and the values of the rows [0, high): two lists with one tensor (rows, G, S, D) per layer."""
        return [store.keys[:high] for store in self.stores], [store.values[:high] for store in self.stores]

    def keep(self, start: Tensor, path: Tensor) -> None:
        """Move the accepted path of a tree in the rows [0, A) to the slots after its anchor, in every layer. start
        (A,): the slots of the anchors. path (A, m): the accepted nodes of each row's tree, then -1."""
        stores = [store for store in self.stores if store.is_initialized]  # some layers use the stores of others
        move_path([part[: len(path)] for store in stores for part in (store.keys, store.values)], start, path)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` slots of row `source` to row `target`, in every layer."""
        for layer in self.stores:
            layer.move(source, target, length)

    def clear(self, slot: int) -> None:
        """Set all keys and values of row `slot` to zero. They may contain NaN, and 0 times NaN is NaN even where they
        are masked."""
        for layer in self.stores:
            if layer.is_initialized:
                layer.keys[slot].zero_()
                layer.values[slot].zero_()


def move_path(stores: Sequence[Tensor], start: Tensor, path: Tensor) -> None:
    """Move the keys or values of accepted nodes to the slots after their row's anchor, in order and in place. stores:
    tensors of keys or values (A or more, G, S, D). start (A,): the anchors' slots. path (A, m): the accepted nodes of
    each row's tree, then -1."""
    row = torch.arange(len(path), device=path.device).unsqueeze(1)
    order = torch.arange(1, path.shape[1] + 1, device=path.device)
    start = start.unsqueeze(1)
    source, target = start + (path + 1).clamp(min=0), start + torch.where(path < 0, 0, order)
    for store in stores:
        slots, here = store.transpose(1, 2), store.device  # of a model on several devices, another than that of `path`
        old = slots[row.to(here), source.to(here)]  # read whole before it is written
        slots.index_put_((row.to(here), target.to(here)), old)


def spare_slots(rows: int) -> int:
    """Return the number of spare rows that an engine with `rows` rows adds for waiting prompts: half as many, rounded
    up, at most 8; 0 for an engine of one row."""
    return min((rows + 1) // 2, MOST_SPARE) if rows > 1 else 0


def cache_bytes(config: PreTrainedConfig, rows: int, length: int, dtype: torch.dtype) -> int:
    """Return the bytes of an engine's keys and values once a text has `length` tokens; 0 for a network without
    attention.

    rows: the engine's rows without spare ones. Every row, spare ones too, has the same number of slots. That number is
    doubled until `length` tokens fit, up to the model's context. Keys and values of cross-attention are not counted.
    config: of the network. dtype: of keys and values.
    """
    if not getattr(config.get_text_config(), "num_attention_heads", 0):
        return 0
    slots = FIRST_SLOTS
    while slots < length:
        slots *= 2
    slots = max(length, min(slots, longest_text(config)))
    return (rows + spare_slots(rows)) * slots * token_bytes(config, dtype)


def token_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Return the bytes of the keys and values of one token in all layers, in `dtype`."""
    config_class: Any = type(config)
    try:
        return _stored(config_class, config.to_json_string()) * dtype.itemsize
    except (RuntimeError, ValueError, IndexError):
        # mixture-of-experts code that reads values; a config that names no model; an encoder-decoder whose decoder is
        # deeper than its encoder, of which transformers makes a decoder of another depth
        return _by_config(config.get_text_config()) * dtype.itemsize


@lru_cache(64)
def _stored(config_class: Any, settings: str) -> int:
    """Return how many numbers are stored per token. They are counted on a model on the meta device, since layers may
    share keys and values. settings: the config in JSON."""
    config = config_class.from_dict(json.loads(settings))
    with torch.random.fork_rng(devices=[]), torch.device("meta"), torch.inference_mode():
        model = AutoModelForCausalLM.from_config(config).eval()
        cache = SlotCache(layers_of(config), 1, 1)
        ids = torch.zeros(1, 1, dtype=torch.int64)
        cache.aim(Window(0, 1, ids, 0, 1))
        seen = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        model(input_ids=ids, position_ids=ids, attention_mask=seen, past_key_values=cache, use_cache=True)
    stores = [store for store in cache.stores if store.is_initialized]
    return sum(store.keys.numel() + store.values.numel() for store in stores)


def _by_config(config: PreTrainedConfig) -> int:
    """Return how many numbers are stored per token, computed from the config alone."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * layers_of(config) * heads * size)
