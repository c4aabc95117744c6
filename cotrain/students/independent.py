"""An independent draft: a small causal LM of its own, that reads the text and nothing of the target.

Its starting weights are random, layers of the target, or those of any Hugging Face model.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from cotrain.config.groups import Draft, Init
from cotrain.students.base import DEFAULT, Guess, Seen, Student
from cotrain.students.pretrained import network_of
from cotrain.teacher.target_model import halves, keeps_apart, split
from inference import proposers
from inference.models.dtypes import quantised

ROPES = ("default", "linear", "dynamic", "llama3", "yarn")  # those that any head size can use


class Independent(Student):
    """The student of `inference.proposers.independent`: one guess, the same at every depth (Leviathan et al. 2023,
    arXiv 2211.17192)."""

    kind = DEFAULT

    def __init__(
        self, network: PreTrainedModel, target: PreTrainedModel | None = None, vocabulary: int | None = None
    ) -> None:
        super().__init__(network, target, vocabulary)
        self.read, self.head = halves(network, vocabulary)

    @classmethod
    def initial(cls, draft: Draft, init: Init, target: PreTrainedModel) -> PreTrainedModel:
        """The network before training. Raises ValueError naming the key that is wrong."""
        return first_weights(draft, init, target)

    def refuse(self) -> None:
        """Raises ValueError for a head that does more than project, see `target_model.split`."""
        split(self.network, self.vocabulary)

    def keeps_apart(self) -> bool:
        return keeps_apart(self.network, self.read)

    def guesses(self, batch: Mapping[str, Any], seen: Seen) -> list[Guess]:
        states = self.read(batch["ids"], batch.get("position_ids"))
        return [Guess.everywhere(states, self.head, tuple(self.network.get_output_embeddings().parameters()))]

    def proposer(
        self, *, greedy: bool = False, compile: bool | None = None, int8: bool = False,
        shape: Sequence[int] | None = None,
    ) -> proposers.Independent:  # fmt: skip
        return proposers.Independent(self.network, greedy, compile=compile, int8=int8, shape=shape)


def first_weights(draft: Draft, init: Init, target: PreTrainedModel) -> PreTrainedModel:
    """A causal LM before training. Raises ValueError naming the key that is wrong."""
    if init.kind == "scratch":
        return scratch(target, *_shape(draft))
    if init.kind == "target_layers":
        return from_layers(target, init.layers)
    if init.kind == "pretrained":
        found: PreTrainedModel = network_of(draft, target)
        return found
    raise ValueError(f"init.kind: {init.kind!r} is none of scratch, target_layers, pretrained (with draft.path=)")


def _shape(draft: Draft) -> tuple[int, int, int, int, int]:
    """Of random weights, as `scratch` takes it. Raises ValueError for a size that is not given."""
    sizes = {key: getattr(draft, key) for key in ("width", "layers", "intermediate", "head_dim", "kv_heads")}
    for key, size in sizes.items():
        if size is None:
            raise ValueError(f"draft.{key}: a draft of random weights has one: give it, as draft.width=128")
    width, layers, intermediate, head_dim, kv_heads = sizes.values()
    return width, layers, intermediate, head_dim, kv_heads


def scratch(
    target: PreTrainedModel, width: int, layers: int, intermediate: int, head_dim: int, kv_heads: int
) -> PreTrainedModel:
    """A Llama of random weights with the target's vocabulary, positions, rotary settings and special ids.

    Rotary settings made for one head size (factor lists) or differing between layers stay behind. Raises ValueError
    when head_dim does not divide width, or kv_heads the heads.
    """
    if width % head_dim:
        raise ValueError(f"draft.width: {width} is no multiple of draft.head_dim = {head_dim}")
    if width // head_dim % kv_heads:
        raise ValueError(f"draft.kv_heads: {kv_heads} does not divide width / head_dim = {width // head_dim} heads")
    theirs = target.config.get_text_config()
    rope = theirs.to_dict().get("rope_parameters") or {}
    config = LlamaConfig(
        vocab_size=theirs.vocab_size,
        hidden_size=width,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=width // head_dim,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=theirs.max_position_embeddings,
        rope_parameters=dict(rope) if rope.get("rope_type") in ROPES else None,
        tie_word_embeddings=True,
        bos_token_id=theirs.bos_token_id,
        eos_token_id=theirs.eos_token_id,
        pad_token_id=theirs.pad_token_id,
    )
    return LlamaForCausalLM(config)


def from_layers(target: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """The target cut down to some of its decoder layers, with its embeddings, final norm and head (depth pruning).

    layers: indices, negative ones count from the end. Raises ValueError for an index that is not there, or an
    architecture whose layers are not named `layers.N` / `h.N`.
    """
    total = target.config.get_text_config().num_hidden_layers
    if any(not -total <= layer < total for layer in layers) or not layers:
        raise ValueError(f"init.layers: {list(layers)} are not layers of a target of {total}")
    chosen = [layer % total for layer in layers]
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = len(chosen)
    if quantised(config):
        del config.quantization_config  # what trains is not quantised
    kinds = config.to_dict().get("layer_types")
    if kinds:
        config.layer_types = [kinds[layer] for layer in chosen]
    draft = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    source, state = plain(target), {}
    for name, value in draft.state_dict().items():
        origin = _renumber(name, chosen)
        if origin not in source or source[origin].shape != value.shape:
            raise ValueError(f"init=target_layers: the target has no {origin} to copy into {name}")
        state[name] = source[origin].to(value.dtype)
    draft.load_state_dict(state, assign=next(iter(state.values())).is_meta)
    draft.tie_weights()
    return draft


def plain(target: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The target's tensors by name; quantised ones (bitsandbytes) as the numbers that they stand for."""
    state = target.state_dict()  # on a CPU this also undoes the packing of 4-bit weights
    for name, weight in target.named_parameters():
        kind = type(weight).__name__
        if kind in ("Params4bit", "Int8Params"):
            from transformers.integrations.bitsandbytes import dequantize_bnb_weight

            layer = target.get_submodule(name.rpartition(".")[0])
            state[name] = dequantize_bnb_weight(weight, state=layer.state if kind == "Int8Params" else None)
    return state


def _renumber(name: str, chosen: Sequence[int]) -> str:
    """The target's name of a draft parameter: model.layers.0.x -> model.layers.<chosen[0]>.x."""
    parts = name.split(".")
    for at in range(1, len(parts)):
        if parts[at].isdigit() and parts[at - 1] in ("layers", "h"):
            parts[at] = str(chosen[int(parts[at])])
            break
    return ".".join(parts)
