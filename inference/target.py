"""Any Hugging Face causal LM behind one forward on ragged rows."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from inference.cache import SlotCache, Window

FIRST_SLOTS = 256
MASKED_ATTENTION = ("sdpa", "eager")


class LM:
    """A causal LM with slots for `rows` sequences; used as it is, never cast or moved.

    vocabulary: ids in [0, V) have mass; logits past V are cut (padded vocabulary rows), missing ones are -inf.
    context: most tokens a row may hold, at most the model's `max_position_embeddings`.
    Raises ValueError for an attention implementation or a state that rows of different lengths cannot use.
    """

    def __init__(
        self, model: PreTrainedModel, rows: int, vocabulary: int | None = None, context: int | None = None
    ) -> None:
        self.model = model.eval()
        config = model.config.get_text_config()
        _refuse_unsupported(model, config)
        self.vocabulary = vocabulary or config.vocab_size
        self.positions = config.max_position_embeddings
        self.context = min(context or self.positions, self.positions)
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

    def _call(self, module: torch.nn.Module, ids: Tensor, start: Sequence[int], low: int) -> object:
        window = self._window(ids, start, low)
        self.cache.aim(window)
        return module(
            input_ids=ids,
            # padding may stand past the last position there is
            position_ids=window.positions.clamp(max=self.positions - 1),
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

    def move(self, source: int, target: int, length: int) -> None:
        """Copy slot `source` (its first `length` tokens) to slot `target`."""
        self.cache.move(source, target, length)


def _refuse_unsupported(model: PreTrainedModel, config: object) -> None:
    name = type(model).__name__
    if config._attn_implementation not in MASKED_ATTENTION:  # type: ignore[attr-defined]
        raise ValueError(f"{name}: attention {config._attn_implementation!r} takes no 4-d mask; "  # type: ignore[attr-defined]
                         f"load it with attn_implementation='sdpa'")  # fmt: skip
    kinds = set(config.to_dict().get("layer_types") or ["full_attention"])  # type: ignore[attr-defined]
    window = config.to_dict().get("sliding_window")  # type: ignore[attr-defined]
    if kinds != {"full_attention"} or (window and config.to_dict().get("use_sliding_window", True)):  # type: ignore[attr-defined]
        raise ValueError(f"{name}: only full attention can be rolled back here, not {sorted(kinds)} "
                         f"with sliding_window={window}")  # fmt: skip


def load_model(path: str, dtype: torch.dtype | str | None = None, trust_remote_code: bool = False) -> PreTrainedModel:
    """A causal LM from a folder or hub id in `dtype`, the checkpoint's own when None; safetensors only."""
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype or "auto", use_safetensors=True, trust_remote_code=trust_remote_code
    ).eval()
