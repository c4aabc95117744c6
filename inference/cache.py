"""Static key/value slots with a length per row.

One slot a row, new keys and values are written at each row's own positions, and whatever lies past a row's
length is masked, then overwritten: rolling back is lowering a length, nothing is copied or re-aligned.
Active rows fill slots [0, A) without holes, so a pass over them reads plain views.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass
class Window:
    """Where one pass writes and reads: slots [low, high), positions (A, n), slots read up to `limit`.

    `start` is the common first position of all rows, or None when rows differ.
    """

    low: int
    high: int
    positions: Tensor
    start: int | None
    limit: int
    _places: dict[tuple[int, int], Tensor] = field(default_factory=dict, repr=False)

    def places(self, heads: int, slots: int) -> Tensor:
        """Where new tokens stand in `heads` x `slots` of every row laid end to end -> (A heads n); made once a pass."""
        found = self._places.get((heads, slots))
        if found is None:
            row = torch.arange(self.low, self.high, device=self.positions.device)[:, None, None] * heads
            head = torch.arange(heads, device=self.positions.device)[:, None]
            found = ((row + head) * slots + self.positions.unsqueeze(1)).flatten()
            self._places[heads, slots] = found
        return found


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
            keys, values = self.keys, self.values
            self.slots = slots
            self.keys, self.values = self._new(keys), self._new(values)
            self.keys[:, :, : keys.shape[2]] = keys
            self.values[:, :, : values.shape[2]] = values
        self.slots = slots


def _write(store: Tensor, states: Tensor, window: Window) -> Tensor:
    places = window.places(store.shape[1], store.shape[2])
    store.flatten(0, 2).index_copy_(0, places, states.flatten(0, 2))
    return store[window.low : window.high, :, : window.limit]


class SlotCache(Cache):
    """One SlotLayer a decoder layer, all sharing the window of the pass in progress."""

    def __init__(self, layers: int, rows: int, slots: int) -> None:
        self.stores = [SlotLayer(rows, slots) for _ in range(layers)]
        super().__init__(layers=[*self.stores])
        self.slots = slots

    def aim(self, window: Window) -> None:
        """Set the window of the next pass; slots are added when it reads past the end."""
        if window.limit > self.slots:
            self.slots = max(window.limit, 2 * self.slots)
            for layer in self.stores:
                layer.grow(self.slots)
        for layer in self.stores:
            layer.window = window

    def held(self, rows: int) -> tuple[list[Tensor], list[Tensor]]:
        """Keys, and values, of the first `rows` slots of every layer."""
        return [store.keys[:rows] for store in self.stores], [store.values[:rows] for store in self.stores]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another."""
        for layer in self.stores:
            layer.move(source, target, length)


def sliding_window(config: PreTrainedConfig) -> int | None:
    """How many of the last tokens a sliding layer sees, None when the model has none."""
    settings = config.to_dict()
    width: int | None = settings.get("sliding_window") if settings.get("use_sliding_window", True) else None
    kinds = settings.get("layer_types")
    return width if width and (not kinds or "sliding_attention" in kinds) else None
