"""GGUF files of drafts that read the target's states, for llama.cpp: EAGLE-3, DFlash, and DSpark, which is DFlash with
a Markov head.

llama.cpp gives the draft the inputs of the target's layers, the target's embedding, and the tokenizer of the file. Of
DFlash and DSpark it takes the mask's embedding from the file's own table, at the id of the mask. So such a file has the
target's embedding, with that row replaced if the draft has a mask of its own. A file has a head in any case.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from cotrain.errors import UserError
from cotrain.export.gguf import ENGINE, ROUNDED, add_words, new_writer, permuted, rope_factors, write_all
from inference.drafts.published import LAYER, renamed
from inference.models.pretrained import head_weight
from inference.proposers.block import BlockNetwork
from inference.proposers.eagle import FeatureNetwork

EAGLE, BLOCK = "eagle3", "dflash"  # architectures of llama.cpp
EAGLE_LAYERS = 3  # states that llama.cpp gives a draft of EAGLE-3
WHOLE = {  # our modules -> llama.cpp's names
    "fc": "fc",
    "norm": "output_norm",
    "lm_head": "output",
    "hidden_norm": "enc.output_norm",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
}
OF_LAYER = {
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_features(
    network: FeatureNetwork,
    target: PreTrainedModel,
    words: PreTrainedTokenizerBase | GGUFReader,
    file: Path,
    dtype: str | None = None,
) -> list[str]:
    """Write a draft of kind eagle or block to a GGUF file, and return remarks for the README.

    target: the model that the draft reads. words: the target's tokenizer, or its GGUF file. file: the path to write, in
    an existing folder. dtype: how matrices are stored, a key of `gguf.TYPES`; None for the network's dtype. Raises
    UserError, which names the key, for what llama.cpp does not compute.
    """
    config, block = network.config, isinstance(network, BlockNetwork)
    refuse_network(network, target)
    arch = BLOCK if block else EAGLE
    writer, stored = new_writer(file, arch, network, dtype)
    writer.add_array(f"{arch}.target_layers", list(config.layers))
    remarks = ROUNDED.get(dtype or "", []) + add_words(writer, words, target)
    if block:
        mask = config.dflash_config["mask_token_id"]
        writer.add_uint32(f"{arch}.block_size", config.depths + 1)  # with the anchor
        writer.add_causal_attention(config.causal)
        writer.add_mask_token_id(mask)
        if network.markov_head is not None:
            writer.add_bool(f"{arch}.sample_from_anchor", False)
            writer.add_bool(f"{arch}.has_confidence_head", False)
        if network.mask_embedding is not None:
            remarks.append(f"llama.cpp embeds token {mask} as the mask: a round after this token drafts worse.")
    else:
        writer.add_uint32(f"{arch}.target_hidden_size", config.hidden_size)
        writer.add_bool(f"{arch}.norm_before_residual", config.norm_before_residual)
    write_all(writer, tensors(network, target), stored)
    return remarks


def refuse_network(network: FeatureNetwork, target: PreTrainedModel) -> None:
    """Raise UserError, which names the key in config.json, if llama.cpp computes something else than this draft."""
    at, layers = f"engine={ENGINE} cannot load this draft (set engine=vllm): config.json:", network.config.layers
    block = isinstance(network, BlockNetwork)
    if not block and len(layers) != EAGLE_LAYERS:
        raise UserError(f"{at} it reads the target's states {list(layers)}, but llama.cpp gives {EAGLE_LAYERS}")
    rope, known = network.config.rope_parameters["rope_type"], ("default", "linear", *(() if block else ("llama3",)))
    if rope not in known:
        raise UserError(f"{at} rope_type is {rope}, but only {', '.join(known)} can be written")
    if type(embedding := target.get_input_embeddings()) is not nn.Embedding:
        raise UserError(
            f"engine={ENGINE}: the target's embedding is a {type(embedding).__name__}, and llama.cpp reads its rows "
            "alone: set engine=vllm"
        )


def tensors(network: FeatureNetwork, target: PreTrainedModel) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name in the file, values) for each tensor. Values are float32, those of d2t int64: the target's ids of the
    draft's tokens."""
    config, block = network.config, isinstance(network, BlockNetwork)
    for key, values in renamed(network.state_dict(), LAYER).items():
        if key in ("d2t", "t2d", "mask_embedding"):
            continue
        name, _, part = key.rpartition(".")
        values = values.detach().float().cpu()
        if name in WHOLE:
            name = WHOLE[name]
        else:
            number, layer = name.removeprefix("layers.").split(".", 1)
            name = f"blk.{number}.{OF_LAYER[layer]}"
            if not block and name.endswith(("attn_q", "attn_k")):  # rotated as Llama's
                values = permuted(values, len(values) // config.head_dim)
        yield f"{name}.{part}", values.numpy()
    if network.pruned:
        yield "d2t", network.known.cpu().numpy()
    if isinstance(network, BlockNetwork):
        embedding: Any = target.get_input_embeddings()
        rows = embedding.weight.detach()[: config.vocab_size].float().cpu().clone()
        if network.mask_embedding is None:
            yield "output.weight", head_weight(target)[: config.vocab_size].float().cpu().numpy()
        else:
            rows[config.dflash_config["mask_token_id"]] = network.mask_embedding.detach().float().cpu()
        yield "token_embd.weight", rows.numpy()
    elif config.rope_parameters["rope_type"] == "llama3":
        frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        yield "rope_freqs.weight", rope_factors(frequencies, config.rope_theta)
