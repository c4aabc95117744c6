"""Static key/value slots, a row of them for each text; callers say how long each text is.

New keys and values are written at each row's own positions, and whatever lies past a row's length is masked, then
overwritten: rolling back a chain is lowering that length, and nothing is copied or re-aligned.
Active rows fill slots [0, A) without holes, so a pass over them reads plain views.

A token of a text is in the slot of its position. Nodes of a tree of drafts are in slots of their own, siblings at one
position, until `keep` makes the accepted path a text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from inference.models.passes import Branches, Tree


@dataclass
class Window:
    """Where one pass writes and reads: rows [low, high), positions (A, n), slots read up to `limit`.

    `start` is the common first position of all rows, or None when rows differ. branches: of a tree, else slots are the
    positions.
    """

    low: int
    high: int
    positions: Tensor
    start: int | None
    limit: int
    branches: Branches | None = None
    _places: dict[tuple[int, int], Tensor] = field(default_factory=dict, repr=False)

    @property
    def slots(self) -> Tensor:
        """Where each id's keys and values are written (A, n)."""
        return self.positions if self.branches is None else self.branches.slots

    def places(self, heads: int, slots: int) -> Tensor:
        """Where new tokens stand in `heads` x `slots` of every row laid end to end -> (A heads n); made once a pass."""
        found = self._places.get((heads, slots))
        if found is None:
            row = torch.arange(self.low, self.high, device=self.positions.device)[:, None, None] * heads
            head = torch.arange(heads, device=self.positions.device)[:, None]
            found = ((row + head) * slots + self.slots.unsqueeze(1)).flatten()
            self._places[heads, slots] = found
        return found


def tree_window(tree: Tree, n: int, anchor: Tensor, longest: int, low: int = 0) -> Window:
    """Where the last n columns of a tree go, whose anchors are in slots anchor (A,), `longest` the last of these."""
    rows, anchor, first = len(anchor), anchor.unsqueeze(1), tree.nodes + 1 - n
    slots = anchor + torch.arange(first, tree.nodes + 1, device=anchor.device)
    seen, depths = (part.expand(rows, -1) for part in (tree.seen, tree.depths))
    branches = Branches(anchor, slots, seen[:, first:], depths)
    return Window(low, low + rows, anchor + depths[:, first:], None, longest + 1 + tree.nodes, branches)


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer: (rows, heads, slots, head_dim), allocated at the first pass."""

    keys: Tensor
    values: Tensor
    is_sliding = False
    is_compileable = True

    def __init__(self, rows: int, slots: int) -> None:
        super().__init__()
        self.rows, self.slots = rows, slots
        self.window: Window | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # zeros, since masked garbage must be finite
        self.keys = self._new(key_states)
        self.values = self._new(value_states)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def _new(self, states: Tensor) -> Tensor:
        return states.new_zeros(self.rows, states.shape[1], self.slots, states.shape[3])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write (A, heads, n, head_dim) at the window's positions; return views (A, heads, limit, head_dim)."""
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
            self.keys = _grown(self.keys, slots)  # one after the other: the first of the old ones is free by then
            self.values = _grown(self.values, slots)
        self.slots = slots


def _grown(store: Tensor, slots: int) -> Tensor:
    rows, heads, held, size = store.shape
    new = store.new_zeros(rows, heads, slots, size)
    new[:, :, :held] = store
    return new


def _write(store: Tensor, states: Tensor, window: Window) -> Tensor:
    places = window.places(store.shape[1], store.shape[2])
    store.flatten(0, 2).index_copy_(0, places, states.flatten(0, 2))
    return store[window.low : window.high, :, : window.limit]


class SlotCache(Cache):
    """One SlotLayer a decoder layer, all sharing the window of the pass in progress.

    context: most tokens a row may hold, None for no bound; slots go past it only for drafts beyond a row's last token.
    """

    def __init__(self, layers: int, rows: int, slots: int, context: int | None = None) -> None:
        self.stores = [SlotLayer(rows, slots) for _ in range(layers)]
        super().__init__(layers=[*self.stores])
        self.slots, self.context = slots, context
        self.listeners: list[WeakMethod[Callable[[], None]]] = []

    def before_growth(self, listener: Callable[[], None]) -> None:
        """Call a bound method before slots are added: it should let go of the keys and values, which are replaced. It
        is held weakly, since its object holds this cache."""
        self.listeners.append(WeakMethod(listener))

    def aim(self, window: Window) -> None:
        """Set the window of the next pass; slots are added when it reads past the end."""
        if window.limit > self.slots:
            for listener in self.listeners:
                if (forget := listener()) is not None:
                    forget()
            self.slots = self._wanted(window)
            for layer in self.stores:
                layer.grow(self.slots)
        for layer in self.stores:
            layer.window = window

    def _wanted(self, window: Window) -> int:
        """Twice the slots, at most the context's; past it, room for as many drafts as this pass has."""
        if self.context is None:
            return max(window.limit, 2 * self.slots)
        if window.limit <= self.context:
            return min(max(window.limit, 2 * self.slots), self.context)
        return max(window.limit, self.context + window.positions.shape[1])

    def held(self, rows: int) -> tuple[list[Tensor], list[Tensor]]:
        """Keys, and values, of the first `rows` slots of every layer."""
        return [store.keys[:rows] for store in self.stores], [store.values[:rows] for store in self.stores]

    def keep(self, start: Tensor, path: Tensor) -> None:
        """See `kept`, of the rows [0, A)."""
        stores = [store for store in self.stores if store.is_initialized]  # layers may share those of others
        kept([part[: len(path)] for store in stores for part in (store.keys, store.values)], start, path)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another."""
        for layer in self.stores:
            layer.move(source, target, length)


def kept(stores: Sequence[Tensor], start: Tensor, path: Tensor) -> None:
    """Move what is stored of the nodes path (A, m) of each row's tree, whose anchor is in slot start (A,), to the slots
    after the anchor, one after the other; -1: there is none. stores: keys or values (A or more, G, S, D)."""
    row = torch.arange(len(path), device=path.device).unsqueeze(1)
    order = torch.arange(1, path.shape[1] + 1, device=path.device)
    start = start.unsqueeze(1)
    source, target = start + (path + 1).clamp(min=0), start + torch.where(path < 0, 0, order)
    for store in stores:
        slots = store.transpose(1, 2)
        slots.index_put_((row, target), slots[row, source])  # read whole before it is written


def sliding_window(config: PreTrainedConfig) -> int | None:
    """How many of the last tokens a sliding layer sees, None when the model has none."""
    settings = config.to_dict()
    width: int | None = settings.get("sliding_window") if settings.get("use_sliding_window", True) else None
    kinds = settings.get("layer_types")
    return width if width and (not kinds or "sliding_attention" in kinds) else None
