"""The forward of an encoder-decoder. Its encoder runs once per source; the decoder runs as a causal LM does.

The keys and values of the decoder's self-attention are in a `SlotCache`. The keys and values of cross-attention are
computed from the encoder's states; they are in the same rows of a `CrossStore`. transformers' decoders compute
positions from one length for all rows. Here rows differ in length, and nodes of a tree share positions. Therefore hooks
give the model the position of each id during a pass: in the table of positions (BART, Marian, Whisper), or as a
position bias of the first layer, which all layers use (T5).

A rows, n ids per row, L slots per row, S ids or frames of the longest source, D width, H heads.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache

from inference.models.cache import SlotCache, Window, grown
from inference.models.forward import Stock, positions_on_paths
from inference.models.passes import Layers, Pass
from inference.models.pretrained import decoder_layers, id_of, length_of
from inference.sampling import up_to
from inference.source import Source


class Encoded(NamedTuple):
    """The encoder's states of A sources. states (A, S, D). lengths: for each source, its number of ids or frames."""

    states: Tensor
    lengths: list[int]


class CrossLayer(CacheLayerMixin):
    """The cross-attention keys and values of one layer. `stored` has both for all rows, each (rows, H, S, head_dim).
    `keys` and `values` are views of the present pass's rows."""

    stored: tuple[Tensor, Tensor]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Raise RuntimeError, since only `CrossStore.write` writes."""
        raise RuntimeError("CrossLayer.update: cross-attention reads what LM.encode stored")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length(), 0

    def get_seq_length(self) -> int:
        return 0 if self.keys is None else int(self.keys.shape[2])

    get_max_length = get_seq_length
    get_max_cache_shape = get_seq_length  # its name before transformers 5.20


class CrossStore(Cache):
    """The cross-attention keys and values of every row. They grow with the longest source. lengths: for each row, its
    source's number of ids or frames. layers: number of decoder layers. rows: number of rows."""

    def __init__(self, layers: int, rows: int) -> None:
        self.stores = [CrossLayer() for _ in range(layers)]
        super().__init__(layers=[*self.stores])
        self.lengths, self.width = [0] * rows, 0
        self.aimed: tuple[int, int] | None = None  # rows of the views
        self.seen: Tensor | None = None

    def write(self, low: int, parts: Sequence[tuple[Tensor, Tensor]], lengths: list[int]) -> None:
        """Store keys and values in rows low, low + 1, ... parts: for each layer, its keys and values (A, H, S,
        head_dim). Entries after a source's end are set to zero, since masked values must be finite. lengths: for each
        source, its number of ids or frames."""
        high, width = low + len(lengths), parts[0][0].shape[2]
        for layer, part in zip(self.stores, parts, strict=True):
            if self.width == 0:
                layer.stored = tuple(
                    one.new_zeros(len(self.lengths), one.shape[1], width, one.shape[3]) for one in part
                )  # type: ignore[assignment]
            elif width > self.width:
                layer.stored = grown(layer.stored[0], width), grown(layer.stored[1], width)
            for store, one in zip(layer.stored, part, strict=True):
                store[low:high, :, :width] = one
                store[low:high, :, width:] = 0
        self.lengths[low:high], self.width, self.aimed = lengths, max(width, self.width), None

    def aim(self, low: int, high: int) -> Tensor | None:
        """Make `keys` and `values` of every layer views of the rows [low, high). Return a bool tensor (A, 1, 1, S) that
        is True for the entries that each row sees, or None if every row sees all."""
        if self.aimed != (low, high):
            lengths = self.lengths[low:high]
            width, self.seen = max(lengths), None
            for layer in self.stores:
                layer.keys, layer.values = (store[low:high, :, :width] for store in layer.stored)
                layer.is_initialized = True
            if min(lengths) < width:
                ends = torch.tensor(lengths, device=self.stores[0].stored[0].device)
                self.seen = up_to(ends.view(-1, 1, 1), width)
            self.aimed = low, high
        return self.seen

    def move(self, source: int, target: int) -> None:
        """Copy row `source` to row `target`, in every layer."""
        for layer in self.stores:
            for store in layer.stored:
                store[target] = store[source]
        self.lengths[target], self.aimed = self.lengths[source], None

    def clear(self, slot: int) -> None:
        """Set the keys and values of row `slot` to zero, in every layer."""
        for layer in self.stores:
            for store in layer.stored:
                store[slot].zero_()


class EncoderDecoder(Stock):
    """The forward of transformers' decoder, with cross-attention to each row's source. cache, cross: for self-attention
    and for cross-attention. context: the largest number of ids per row. Raises ValueError for a decoder of another
    structure. Its logits are checked like every model's (`selfcheck`)."""

    def __init__(self, model: PreTrainedModel, cache: SlotCache, cross: CrossStore, context: int) -> None:
        super().__init__(model, cache, context)
        layers = decoder_layers(model)
        for layer in layers:
            cross_attention(model, layer)
        self.cross, self.both = cross, EncoderDecoderCache(cache, cross)
        self.both.is_updated = dict.fromkeys(range(len(layers)), True)

    def encode(self, sources: Sequence[Source]) -> Encoded:
        """Return the encoder's states of the sources, computed in one pass. The sources are all ids or all features."""
        encoder: Any = self.model.get_encoder()
        lengths, inputs = padded_sources(self.model, sources)
        states: Tensor = encoder(**inputs).last_hidden_state
        return Encoded(states, [states.shape[1]] * len(states) if isinstance(sources[0], Tensor) else lengths)

    def store_source(self, low: int, encoded: Encoded) -> None:
        """Compute the cross-attention keys and values from the encoder's states, and store them in rows low, low + 1,
        ... encoded: the states of as many sources, in the order of the rows."""
        parts = [cross_attention(self.model, layer)(encoded.states) for layer in decoder_layers(self.model)]
        self.cross.write(low, parts, encoded.lengths)

    def forward(self, ids: Tensor, window: Window, only: Tensor | None = None, layers: Layers = ()) -> Pass:
        return self._scaled(ids, window, only, layers)

    def _call(self, module: nn.Module, ids: Tensor, window: Window) -> Any:
        window, decoder = self._inside(window), self.model.get_decoder()
        seen = self.cross.aim(window.low, window.high)
        keys = self.cross.stores[0].keys
        assert keys is not None
        states = keys.new_zeros(()).expand(len(keys), keys.shape[2], 1)  # of the encoder: only their shape is read
        mask = {} if seen is None else {"encoder_attention_mask": self._mask(seen)}
        with placed(decoder, window, self.context):
            return decoder(
                input_ids=ids,
                attention_mask=self._masks(window, ids.device),
                encoder_hidden_states=states,
                past_key_values=self.both,
                use_cache=True,
                **mask,
            )


class CrossProjections(NamedTuple):
    """The modules of a decoder layer that compute its cross-attention's keys and values. size: width of a head."""

    keys: nn.Module
    values: nn.Module
    size: int

    def __call__(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values, each (A, H, S, size). states (A, S, D): the encoder's."""
        keys, values = (project(states).unflatten(-1, (-1, self.size)) for project in (self.keys, self.values))
        return keys.transpose(1, 2), values.transpose(1, 2)


def cross_attention(model: PreTrainedModel, layer: nn.Module) -> CrossProjections:
    """Return the cross-attention projections of a decoder layer. Raises ValueError for a layer that is neither T5's nor
    BART's."""
    modules: dict[str, Any] = dict(layer.named_modules())
    if bart := modules.get("encoder_attn"):
        return CrossProjections(bart.k_proj, bart.v_proj, bart.head_dim)
    if t5 := modules.get("layer.1.EncDecAttention"):
        return CrossProjections(t5.k, t5.v, t5.key_value_proj_dim)
    raise ValueError(
        f"{type(model).__name__}: its decoder layers, {type(layer).__name__}, are not supported; use a model with the "
        "layers of T5, BART, Marian or Whisper"
    )


def padded_sources(model: PreTrainedModel, sources: Sequence[Source]) -> tuple[list[int], dict[str, Tensor]]:
    """Return each source's number of ids or frames, and the encoder's arguments by name: input_ids and attention_mask
    (A, S), or input_features (A, F, T). Ids are padded on the right, with an attention mask; features all have one
    shape.

    A draft's encoder may support less than the target's: an id that it lacks becomes its last id, and a source that is
    too long for it is cut at the end.
    """
    if isinstance(sources[0], Tensor):
        features = torch.stack([source for source in sources if isinstance(source, Tensor)])
        return [features.shape[-1]] * len(features), {"input_features": features.to(model.device, model.dtype)}
    longest, last = longest_source(model), model.config.vocab_size - 1
    known = [[min(int(token), last) for token in source[:longest]] for source in sources]
    lengths = [len(source) for source in known]
    pad, width = id_of(model.config, "pad_token_id") or 0, max(lengths)
    rows = [[*source, *[pad] * (width - len(source))] for source in known]
    inputs = {"input_ids": torch.tensor(rows, device=model.device)}
    if min(lengths) < width:
        inputs["attention_mask"] = up_to(torch.tensor(lengths, device=model.device), width).long()
    return lengths, inputs


def relative_bias(attention: Any, positions: Tensor, at: Tensor) -> Tensor:
    """Return T5's attention bias (A, H, n, L) for tokens at positions (A, n). attention: T5's first self-attention
    module. at, (L,) or (A, 1, L): the position of the token in each slot."""
    bucket = attention._relative_position_bucket(
        at - positions.unsqueeze(-1),
        bidirectional=False,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=attention.relative_attention_max_distance,
    )
    bias: Tensor = attention.relative_attention_bias(bucket)
    return bias.permute(0, 3, 1, 2)


@contextmanager
def placed(decoder: nn.Module, window: Window, context: int) -> Iterator[None]:
    """Within the `with` block, hooks give the decoder the positions of the window's ids. context: number of positions;
    later ones are read as the last one."""
    positions = window.positions.clamp(max=context - 1)
    if isinstance(table := getattr(decoder, "embed_positions", None), nn.Module):
        handles = _in_table(table, positions)
    else:
        positions = positions if window.start is None else positions[:1]
        slots = torch.arange(window.limit, device=positions.device)
        at = slots if window.branches is None else positions_on_paths(slots, window.branches)
        first: Any = next(module for module in decoder.children() if isinstance(module, nn.ModuleList))[0]
        bias = relative_bias(first.layer[0].SelfAttention, positions, at)
        handles = [first.register_forward_pre_hook(lambda _, given: (*given[:2], bias, *given[3:]))]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _in_table(table: nn.Module, positions: Tensor) -> list[Any]:
    """Hook a table of positions so that it returns its entries (A, n, D) at `positions` (A, n). Return the hooks'
    handles. Tables differ in the shapes that they accept, but all accept one row of positions."""

    def before(_: nn.Module, given: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return given, named | {"position_ids": positions.flatten()}

    def after(_: nn.Module, __: Any, entries: Tensor) -> Tensor:
        return entries.reshape(*positions.shape, -1)

    return [table.register_forward_pre_hook(before, with_kwargs=True), table.register_forward_hook(after)]


def own_inputs(model: PreTrainedModel, ids: Tensor, source: Source | None) -> dict[str, Tensor]:
    """Return the keyword arguments of the model's own forward, by name. ids (B, n): B texts. source: the source of all
    these texts, or None for a causal LM."""
    if source is None:
        return {"input_ids": ids}
    _, inputs = padded_sources(model, [source])
    return {name: part.expand(len(ids), *part.shape[1:]) for name, part in inputs.items()} | {"decoder_input_ids": ids}


def features_shape(model: PreTrainedModel) -> tuple[int, int] | None:
    """Return the shape (F, T) of the features that the model's encoder reads, or None if it reads token ids. Raises
    ValueError, naming the model, for an encoder that reads anything else."""
    config: Any = model.config
    if model.main_input_name == "input_ids":
        return None
    if model.main_input_name != "input_features" or not hasattr(config, "num_mel_bins"):
        raise ValueError(
            f"{type(model).__name__}: its encoder reads {model.main_input_name}, which is not supported; use a model "
            "that reads token ids, like T5, BART and Marian, or input_features, like Whisper"
        )
    return config.num_mel_bins, 2 * config.max_source_positions


def longest_source(model: PreTrainedModel) -> int | None:
    """Return the largest number of ids that the model's encoder reads. Return None for relative positions, which have
    no limit."""
    return length_of(model.config) if hasattr(model.get_decoder(), "embed_positions") else None


def refuse_other_sources(draft: PreTrainedModel, target: PreTrainedModel, where: str) -> None:
    """Raise ValueError if the draft has an encoder that cannot read the target's sources. where: the start of the
    message."""
    if not draft.config.is_encoder_decoder:
        return
    if not target.config.is_encoder_decoder:
        raise ValueError(
            f"{where}: {type(draft).__name__} has an encoder, but the target has none: give a causal LM as the draft"
        )
    ours, theirs = (features_shape(model) or "token ids" for model in (draft, target))
    if ours != theirs:
        raise ValueError(
            f"{where}: the encoder of {type(draft).__name__} reads {ours}, but the target's reads {theirs}: give a "
            "draft whose encoder reads the same"
        )


def any_source(model: PreTrainedModel, length: int, seed: int) -> Source:
    """Return a meaningless source, for checks and timings: `length` random token ids, or random features. seed: of the
    random numbers."""
    shape, seeded = features_shape(model), torch.Generator().manual_seed(seed)
    if shape is None:
        return tuple(torch.randint(model.config.vocab_size, (length,), generator=seeded).tolist())
    return torch.randn(shape, generator=seeded)


def same_encoder(draft: PreTrainedModel, target: PreTrainedModel, as_run: bool = True) -> bool:
    """Return whether both models have an encoder, with equal weights. as_run: whether dtype and device must be equal
    too, so that both encoders give equal states. False for models on the meta device, which have no weights."""
    if not (draft.config.is_encoder_decoder and target.config.is_encoder_decoder):
        return False
    if "meta" in (draft.device.type, target.device.type):
        return False
    ours, theirs = (model.get_encoder().state_dict() for model in (draft, target))
    return ours.keys() == theirs.keys() and all(_equal(one, theirs[name], as_run) for name, one in ours.items())


def _equal(one: Tensor, other: Tensor, as_run: bool) -> bool:
    if one.shape != other.shape or as_run and (one.dtype, one.device) != (other.dtype, other.device):
        return False
    return torch.equal(one, other) if as_run else torch.equal(one.double(), other.to(one.device).double())
