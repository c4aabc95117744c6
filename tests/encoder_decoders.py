"""Tiny random encoder-decoders, and what transformers itself says of them: one row at a time, without a cache."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GenerationMixin,
    MarianConfig,
    MarianMTModel,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from inference.models.encoder_decoder import own_inputs
from inference.proposers import Independent, NGram
from inference.proposers.eagle import Eagle
from inference.proposers.heads import Hydra, Medusa
from inference.proposers.hybrid import Hybrid
from inference.proposers.quantised import Quantised
from inference.proposers.retrieval import Retrieval
from inference.proposers.two_levels import TwoLevels
from inference.source import Source, source_in_text
from tests import kinds
from tests.tiny import near, tiny

VOCABULARY, MELS, FRAMES = 32, 6, 14


def t5(
    seed: int = 0, vocab: int = VOCABULARY, layers: int = 2, eos: int | None = 1, encoder: int = 2, **settings: Any
) -> Any:
    """Its buckets of distance are small and end early, so that a wrong distance is another bias."""
    torch.manual_seed(seed)
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=vocab,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=encoder,
            num_decoder_layers=layers,
            num_heads=2,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=12,
            feed_forward_proj="gated-gelu",
            decoder_start_token_id=0,
            eos_token_id=eos,
            pad_token_id=0,
            **settings,
        )
    )
    return _ready(model, 0.5)


def bart(
    seed: int = 0, made: Any = (BartConfig, BartForConditionalGeneration), positions: int = 64, **other: Any
) -> Any:
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 2,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "max_position_embeddings": positions,
        "decoder_start_token_id": 2,
        "eos_token_id": 2,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "forced_eos_token_id": None,
    }
    model = made[1](made[0](**settings | other))
    model = _ready(model, 0.5)
    with torch.no_grad():
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_()
    return model


def marian(seed: int = 0, **other: Any) -> Any:
    return bart(seed, (MarianConfig, MarianMTModel), scale_embedding=True, **other)


def whisper(seed: int = 0, **other: Any) -> Any:
    made = (WhisperConfig, WhisperForConditionalGeneration)
    settings = {"num_mel_bins": MELS, "max_source_positions": FRAMES // 2, "max_target_positions": 64}
    model = bart(seed, made, **settings, suppress_tokens=None, begin_suppress_tokens=None, **other)
    model.generation_config.forced_decoder_ids = [[1, 5], [2, 7]]
    return model


def _ready(model: Any, deviation: float) -> Any:
    """Weights so large that distributions are far from uniform, and differ from source to source."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.requires_grad and weight.dim() > 1:
                crosses = any(part in name for part in ("EncDecAttention.o", "encoder_attn.out_proj"))
                weight.normal_(std=4 * deviation if crosses else deviation)
            elif "norm" not in name and weight.requires_grad:
                weight.normal_(std=0.1)
    return model.double().eval()


FAMILIES: dict[str, Callable[..., Any]] = {"t5": t5, "bart": bart, "marian": marian, "whisper": whisper}


def sources(model: PreTrainedModel, count: int, seed: int = 0) -> list[Any]:
    """Prompts of that many sources, of lengths 1 to 11: ids, or features."""
    made = torch.Generator().manual_seed(seed)
    if model.main_input_name == "input_features":
        return [{"input_features": torch.randn(MELS, FRAMES, generator=made)} for _ in range(count)]
    size = model.config.vocab_size
    lengths = [(7 * n + seed) % 11 + 1 for n in range(count)]
    return [torch.randint(3, size, (length,), generator=made).tolist() for length in lengths]


@torch.no_grad()
def own_logits(model: PreTrainedModel, text: Sequence[int], source: Source | None = None) -> torch.Tensor:
    """The logits (n, V) after each id of a text, from one whole forward of the model alone."""
    inputs = own_inputs(model, torch.tensor([list(text)]), source if source is not None else source_in_text(text))
    return model(**inputs, use_cache=False).logits[0]


def generated(model: PreTrainedModel, start: Sequence[int], n: int, **more: Any) -> list[int]:
    """The n tokens, or fewer, of transformers' own greedy generate for one source. start: of `Engine.starts`."""
    inputs = own_inputs(model, torch.tensor([list(start)]), source_in_text(start))
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": n, "num_beams": 1} | more
    out: Any = GenerationMixin.generate(model, **inputs, **settings)  # Whisper's own splits sounds into segments
    return [int(token) for token in out[0, len(start) :]]


def with_encoder_of(target: Any, noise: float = 0.1, seed: int = 1) -> Any:
    """A draft near the target, whose encoder is the target's."""
    draft = near(target, noise, seed)
    draft.get_encoder().load_state_dict(target.get_encoder().state_dict())
    return draft


# for each kind of draft that an encoder-decoder can have, a proposer that is often right and not always
DRAFTS: dict[str, Callable[[Any], Any]] = {
    "independent": lambda target: Independent(near(target, 0.05)),
    "shared encoder": lambda target: Independent(with_encoder_of(target, 0.05)),
    "greedy": lambda target: Independent(near(target, 0.05), greedy=True),
    "causal": lambda target: Independent(tiny(vocab=target.config.vocab_size)),
    "ngram": lambda target: NGram(),
    "retrieval": lambda target: Retrieval(shortest=1),
    "hybrid": lambda target: Hybrid(Independent(with_encoder_of(target, 0.05)), Retrieval(shortest=1)),
    "medusa": lambda target: Medusa(kinds.medusa(target)),
    "hydra": lambda target: Hydra(kinds.hydra(target)),
    "eagle": lambda target: Eagle(kinds.eagle(target)),
    "quantised": Quantised,
    "two_levels": lambda target: TwoLevels(Quantised(target), Independent(near(target, 0.05))),
}
