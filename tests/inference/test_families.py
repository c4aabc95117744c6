"""Model families: batched drafting gives the greedy text of transformers in float64, or a clear refusal."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from cotrain.students.independent import scratch
from cotrain.students.parallel import name_mask
from inference import Engine, Sampling
from inference.models.cache import cache_bytes
from inference.models.lm import LM
from inference.models.pretrained import auto_class
from inference.policy import Fixed
from inference.proposers import Independent
from inference.proposers.parallel import MASK
from inference.request import ends_of, pads_of
from tests.often import often
from tests.tiny import continued, near

CONTEXT = 24
PROMPTS = [
    [3, 5, 7, 3, 5],
    [1],
    [2, 9, 4, 4, 0, 4, 31, 8, 1, 2, 3, 9, 9],
    [7, 7],
    [30, 1, 2],
    [4, 0, 4, 0, 4, 0, 4, 0, 4, 0],
    [12, 13, 14, 15, 16, 17, 18],
    [9, 8, 7, 6, 5, 4],
]

IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
COMMON = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.6,
    **IDS,
}
GROUPED = {**COMMON, "num_key_value_heads": 1}
HEADS = {**GROUPED, "head_dim": 8}
GPT = {
    "vocab_size": 32,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": CONTEXT,
    "initializer_range": 0.6,
    **IDS,
}
OPT = {
    "vocab_size": 32,
    "hidden_size": 16,
    "ffn_dim": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": CONTEXT,
    "word_embed_proj_dim": 16,
    "init_std": 0.6,
    **IDS,
}
LONG = {
    "max_position_embeddings": 96,
    "original_max_position_embeddings": CONTEXT,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [9.0] * 4,
    },
}

WINDOW = {**GROUPED, "sliding_window": 8}
MIXED = {**HEADS, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
# kernels of experts side by side are for 32 bits and fewer
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
LLAMA4 = {
    **HEADS,
    **EXPERTS,
    "intermediate_size_mlp": 16,
    "no_rope_layers": [1, 0],
    "floor_scale": CONTEXT + 1,
    "attention_chunk_size": 8,
    "layer_types": ["chunked_attention", "full_attention"],
}
GEMMA4 = {**MIXED, "global_head_dim": 8, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 32}
SHARED = {"num_hidden_layers": 4, "layer_types": 2 * MIXED["layer_types"], "num_kv_shared_layers": 2}
# its config has no pad_token_id
CODEGEN = {
    "vocab_size": 32,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": CONTEXT,
    "rotary_dim": 4,
    "initializer_range": 0.6,
    "bos_token_id": None,
    "eos_token_id": None,
}
SPEECH = {
    "vocab_size": 32,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "input_feat_per_channel": 6,
    "conv_channels": 16,
}
MPT = {
    **IDS,
    "vocab_size": 32,
    "d_model": 16,
    "n_layers": 2,
    "n_heads": 2,
    "max_seq_len": CONTEXT + 1,
    "initializer_range": 0.6,
}

SUPPORTED = [
    ("Llama", GROUPED),
    ("Llama", {**GROUPED, "attn_implementation": "eager"}),
    ("Qwen2", GROUPED),
    ("Qwen3", HEADS),
    ("Mistral", {**GROUPED, "sliding_window": None}),
    ("Mistral", {**GROUPED, "sliding_window": 8}),
    ("Gemma", HEADS),
    ("Gemma2", {**HEADS, "sliding_window": 8}),
    ("Gemma3Text", {**HEADS, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    ("Qwen2", {**GROUPED, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    ("Phi", COMMON),
    ("Phi3", {**GROUPED, **LONG}),
    ("GPTNeoX", COMMON),
    ("Falcon", {**COMMON, "alibi": False}),
    ("OPT", OPT),
    ("GPT2", GPT),
    ("GPTJ", {**GPT, "rotary_dim": 4}),
]
BEHAVING = [  # accepted by the self-check, with the form of mask that it finds
    ("Mpt", MPT, "one"),
    ("CodeGen", CODEGEN, "one"),
    ("StableLm", GROUPED, "one"),
    ("Olmo2", GROUPED, "one"),
    ("Phi3", WINDOW, "near"),
    ("Starcoder2", WINDOW, "near"),
    ("Mixtral", {**WINDOW, **EXPERTS}, "near"),
    ("Cohere2", MIXED, "kinds"),
    ("GptOss", {**MIXED, **EXPERTS}, "kinds"),
    ("Olmo3", {**WINDOW, "layer_types": MIXED["layer_types"]}, "kinds"),
    ("Exaone4", MIXED, "kinds"),
    ("Ministral", MIXED, "kinds"),
    ("Gemma4Text", {**GEMMA4, "num_kv_shared_layers": 0}, "kinds"),
    ("Gemma4Text", {**GEMMA4, **SHARED}, "kinds"),
    ("Llama4Text", LLAMA4, "kinds"),
    ("Bert", {**COMMON, "is_decoder": True}, "one"),
]
REFUSED = [
    (
        "GPTNeo",
        {
            **IDS,
            "vocab_size": 32,
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 2,
            "window_size": 4,
            "attention_types": [[["global", "local"], 1]],
        },
        "local",
    ),
    ("Bloom", {**IDS, "vocab_size": 32, "hidden_size": 16, "n_layer": 2, "n_head": 2}, "ALiBi .* 2-d"),
    ("Falcon", {**COMMON, "alibi": True}, "ALiBi .* 2-d"),
    ("Mamba", {**IDS, "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}, "rolled back"),
    ("XLNet", {"vocab_size": 32, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32}, "its passes"),
    ("Speech2Text", SPEECH, "its encoder reads input_features, which is not supported"),
    ("GPT2", {**GPT, "n_positions": 1}, "context=1 leaves no room for a prompt and a new token"),
    ("UMT5", {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}, "its passes"),
    (
        "ProphetNet",
        {"vocab_size": 32, "hidden_size": 16, "num_encoder_layers": 1, "num_decoder_layers": 1},
        "decoder layers, .* are not supported",
    ),
    (
        "Marian",
        {
            "decoder_vocab_size": 60,
            "vocab_size": 58,
            "share_encoder_decoder_embeddings": False,
            "pad_token_id": 1,
            "d_model": 16,
            "encoder_layers": 1,
            "decoder_layers": 1,
        },
        "decoder_vocab_size=60",
    ),
    ("Llama", {**GROUPED, "attn_implementation": "flex_attention"}, "attn_implementation='sdpa'"),
]


def build(family: str, settings: dict[str, Any]):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**settings)
    return auto_class(config).from_config(config).double().eval()


@pytest.mark.thorough
@pytest.mark.parametrize(("family", "settings"), SUPPORTED, ids=[name for name, _ in SUPPORTED])
def test_greedy_text_up_to_the_end_of_the_context(family, settings):
    """Padding stands past the last position of the rows that reach it first."""
    model = build(family, settings)
    wanted = [continued(model, text, CONTEXT - len(text)) for text in PROMPTS]
    for rows in (1, 3, 8):
        engine = Engine(model, Independent(near(model)), rows=rows, policy=Fixed(3))
        out = engine.generate(PROMPTS, sampling=Sampling(0))
        assert out.tokens == wanted
        assert sum(out.stats.accepted) > 5


# masks of every form, experts, layers that share keys, a decoder that was an encoder
OFTEN = {"Mpt", "Phi3", "GptOss", "Gemma4Text", "Bert"}


@pytest.mark.parametrize(
    ("family", "settings", "form"),
    often(BEHAVING, lambda case: case[0] in OFTEN),
    ids=[name for name, *_ in BEHAVING],
)
def test_families_that_the_self_check_accepts(family, settings, form):
    model = build(family, settings)
    prompts = [PROMPTS[1], PROMPTS[2]]
    limits = [CONTEXT - 9 - 1, CONTEXT - len(PROMPTS[2])]  # beyond every window; up to the end of the context
    engine = Engine(model, Independent(near(model)), rows=2, policy=Fixed(3))
    assert engine.target.run.form == form
    out = engine.generate(prompts, max_new_tokens=limits, sampling=Sampling(0))
    assert out.tokens == [continued(model, text, n) for text, n in zip(prompts, limits, strict=True)]


@pytest.mark.parametrize(("family", "settings", "names"), REFUSED, ids=[name for name, *_ in REFUSED])
def test_models_without_rollback_are_rejected(family, settings, names):
    model = build(family, settings)
    with pytest.raises(ValueError, match=rf"{type(model).__name__}: .*{names}"):
        Engine(model)


def test_a_config_may_lack_special_ids() -> None:
    """Of a target that drafts are made for, and of a draft that predicts at mask tokens."""
    model = build("CodeGen", CODEGEN)
    assert not hasattr(model.config, "pad_token_id")
    assert scratch(model, 16, 1, 16, 8, 1).config.pad_token_id is None
    name_mask(model, None)
    assert getattr(model.config, MASK) == 31
    bare: Any = SimpleNamespace(config=transformers.CpmAntConfig(), generation_config=None)
    assert not hasattr(bare.config, "eos_token_id") and ends_of(bare) == frozenset() == pads_of(bare, None)


@pytest.mark.parametrize(
    ("family", "settings"),
    often(
        {name: (name, settings) for name, settings, *_ in SUPPORTED + BEHAVING}.values(),
        lambda case: case[0] in {"GPT2", *OFTEN},
    ),
)
def test_an_estimate_of_keys_and_values_is_what_an_engine_holds(family, settings):
    """Heads that share keys, layers that share those of others, contexts under other names."""
    config, length = getattr(transformers, f"{family}Config")(**settings), 13
    model = AutoModelForCausalLM.from_config(config).eval()
    lm = LM(model, 3, spare=2)
    lm.store(torch.ones(5, length, dtype=torch.int64), [0] * 5)
    stores = [store for store in lm.cache.stores if store.is_initialized]
    held_bytes = sum(store.keys.nbytes + store.values.nbytes for store in stores)
    assert held_bytes == cache_bytes(config, 3, length, torch.float32)
