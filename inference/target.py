"""Any Hugging Face causal LM behind one forward on ragged rows."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from inference.cache import SlotCache, Window

FIRST_SLOTS = 256
MASKED_ATTENTION = ("sdpa", "eager")


class LM:
    """A causal LM with slots for `rows` sequences; used as it is, never cast or moved.

    vocabulary: ids in [0, V) have mass; logits past V are cut (padded vocabulary rows), missing ones are -inf,
    and ids that the model has no row for are read as its last one (a draft's guess is worse, never wrong).
    context: most tokens a row may hold, at most the model's `max_position_embeddings`.
    Raises ValueError for an attention implementation or a state that rows of different lengths cannot use.
    """

    def __init__(
        self, model: PreTrainedModel, rows: int, vocabulary: int | None = None, context: int | None = None
    ) -> None:
        self.model = model.eval()
        config = model.config.get_text_config()
        _refuse_unsupported(model, config)
        self.size = config.vocab_size
        self.vocabulary = vocabulary or self.size
        positions = _positions(config)
        self.context = min(context or positions, positions)
        self.cache = SlotCache(config.num_hidden_layers, rows, min(FIRST_SLOTS, self.context))
        self.attention = config._attn_implementation
        self.device, self.dtype = model.device, model.dtype

    def forward(self, ids: Tensor, start: Sequence[int], low: int = 0) -> Tensor:
        """One pass: ids (A, n) of slots [low, low + A) at positions start_b, start_b + 1, ...

        Returns logits (A, n, V). Entries of a row past its real tokens are computed from whatever ids stand
        there and overwritten by its next pass.
        """
        logits = self._call(self.model, ids, start, low).logits
        missing = self.vocabulary - logits.shape[-1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=-math.inf)
        return logits[..., : self.vocabulary]

    def store(self, ids: Tensor, start: Sequence[int], low: int = 0) -> None:
        """As forward, without the head: prompts are stored, nothing is predicted."""
        self._call(self.model.base_model, ids, start, low)

    def _call(self, module: torch.nn.Module, ids: Tensor, start: Sequence[int], low: int) -> Any:
        window = self._window(ids, start, low)
        self.cache.aim(window)
        return module(
            input_ids=ids.clamp(max=self.size - 1),
            # padding may stand past the last position there is
            position_ids=window.positions.clamp(max=self.context - 1),
            attention_mask=self._mask(window),
            past_key_values=self.cache,
            use_cache=True,
        )

    def _window(self, ids: Tensor, start: Sequence[int], low: int) -> Window:
        first, width = max(start), ids.shape[1]
        offsets = torch.arange(width, device=self.device)
        if first == min(start):
            positions = (offsets + first).expand(len(start), width)
            return Window(low, low + len(start), positions, first, first + width)
        positions = torch.tensor(start, device=self.device).unsqueeze(1) + offsets
        return Window(low, low + len(start), positions, None, first + width)

    def _mask(self, window: Window) -> Tensor:
        """(A, 1, n, limit): a token sees the slots up to its own position."""
        slots = torch.arange(window.limit, device=self.device)
        seen = (slots <= window.positions.unsqueeze(-1)).unsqueeze(1)
        if self.attention == "sdpa":
            return seen
        lowest = torch.finfo(self.dtype).min
        return torch.zeros(seen.shape, dtype=self.dtype, device=self.device).masked_fill_(~seen, lowest)

    def wait(self) -> None:
        """Wait for the device, so that a clock sees the work and not its launch; draws on the host do so anyway."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy slot `source` (its first `length` tokens) to slot `target`."""
        self.cache.move(source, target, length)


def _refuse_unsupported(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Raise ValueError for a model whose state cannot be cut back, or which overlooks a 4-d mask."""
    settings, name = config.to_dict(), type(model).__name__
    if config._attn_implementation not in MASKED_ATTENTION:
        raise ValueError(f"{name}: attention {config._attn_implementation!r} takes no 4-d mask; "
                         f"load it with attn_implementation='sdpa'")  # fmt: skip
    if model._is_stateful or config.is_encoder_decoder:
        raise ValueError(f"{name}: only the keys and values of a causal decoder can be rolled back here")
    kinds = {*(settings.get("layer_types") or ()), *(settings.get("attention_layers") or ())}
    window = settings.get("sliding_window") if settings.get("use_sliding_window", True) else None
    if kinds - {"full_attention", "global"} or window:
        raise ValueError(f"{name}: only full attention is supported, not {sorted(kinds)} "
                         f"with sliding_window={window}")  # fmt: skip
    if settings.get("alibi") or "max_position_embeddings" not in {*settings, *config.attribute_map}:
        raise ValueError(f"{name}: only positions given as numbers are supported, not ALiBi")


def _positions(config: PreTrainedConfig) -> int:
    """Most tokens of a text: past LongRoPE's first range a row's rotation would depend on the longest row's."""
    rope = config.to_dict().get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        return min(rope["original_max_position_embeddings"], config.max_position_embeddings)
    return config.max_position_embeddings


def load_model(path: str, dtype: torch.dtype | str | None = None, trust_remote_code: bool = False) -> PreTrainedModel:
    """A causal LM from a folder or hub id in `dtype`, the checkpoint's own when None; safetensors only."""
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype or "auto", use_safetensors=True, trust_remote_code=trust_remote_code
    ).eval()
