"""Drafts in published layouts, converted in memory to the networks of this package.

The layouts are those of EAGLE-3 (SafeAILab, SpecForge, vLLM) and of speculators' EAGLE-3, DFlash and DSpark, and Medusa
heads (vLLM and the original). A folder is recognised by its config.json. Such a folder does not name its target, and
lacks what engines take from the target, for example the output head. Its tensors are read from safetensors, or from a
pickled file if there is no other, with a reader that runs no code. What our networks cannot compute is an error that
names it.

H width of the target's states and of the draft, Vd tokens in the draft's vocabulary, V in the target's.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel

from inference.drafts.weight_files import (
    CONFIG,
    WEIGHTS,
    building,
    differing,
    read_json,
    require_sound,
    shapes_of,
    weight_files,
)
from inference.models.pretrained import layers_of, special_ids
from inference.models.small_heads import refuse_ids

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"  # a key of EAGLE-3's config.json: the layers whose inputs it reads
PICKLED = {WEIGHTS: "pytorch_model.bin", "medusa_lm_head.safetensors": "medusa_lm_head.pt"}
MASK_FILE = "mask_embedding.pt"  # from which vLLM reads the embedding of DFlash's masks
LAYER = {"midlayer.": "layers.0."}  # EAGLE-3's names -> speculators' names
MEDUSA, ORIGINAL = "blocks.{}.layers.{}.{}", "{}.{}.linear.{}"  # of head, block and "weight" or "bias": vLLM's names
NATIVE = "depths"  # a key of config.json that only our feature drafts have
ANGLES = ("default", "linear", "llama3", "yarn")  # rotary angles that do not depend on the length of the text
CLOSE = 0.01  # a tensor equals the target's if the largest difference is below this share of its largest number
SPECULATORS = {"eagle3": "eagle", "eagle": "eagle", "mtp": "eagle", "peagle": "p_eagle"}  # model type -> kind
# keys of config.json that change the network, each with the value that our networks compute
EAGLE_KEYS = {
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_drafting": False,
}
LAYER_KEYS = {"attention_bias": False, "mlp_bias": False, "qkv_bias": False, "hidden_act": "silu", "logit_scale": 1.0}
BLOCK_KEYS = {"projector_type": "dflash", "markov_head_type": "vanilla", "sample_from_anchor": False}


def fused(layers: int) -> tuple[int, int, int]:
    """Return the low, middle and high layer whose states a feature draft reads: 2, L // 2 and L - 3 (EAGLE-3), or
    closer together if L is small. Layer i stands for the states after i decoder layers. layers: the number L of the
    target's layers."""
    return min(2, layers // 3), layers // 2, max(layers - 3, layers // 2)


def renamed(tensors: Mapping[str, Tensor], table: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the tensors with other beginnings of their names. table: beginning -> new beginning."""
    named = {}
    for name, tensor in tensors.items():
        begin = next((begin for begin in table if name.startswith(begin)), "")
        named[table.get(begin, "") + name.removeprefix(begin)] = tensor
    return named


class Converted(NamedTuple):
    """A draft in our own form. config: the settings of its network's config. tensors: by name, those of our network.
    lacking: what the folder lacks and the target gives."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    lacking: list[str]


class Published(NamedTuple):
    """A folder in a published layout.

    title: what it is, for messages. kind: of the draft. path: the folder. values: the content of config.json. convert:
    a function from this object, its tensors and the target to our form. weights: the name of the file of its tensors.
    """

    title: str
    kind: str
    path: Path
    values: Mapping[str, Any]
    convert: Callable[["Published", dict[str, Tensor], PreTrainedModel], Converted]
    weights: str = WEIGHTS

    def files(self) -> list[Path]:
        """Return the files of the tensors. Raises FileNotFoundError or ValueError if they are missing or damaged."""
        pickled = self.path / PICKLED[self.weights]
        whole = any((self.path / f"{self.weights}{end}").is_file() for end in ("", ".index.json"))
        return [pickled] if pickled.is_file() and not whole else weight_files(self.path, self.weights)

    def tensors(self, device: torch.device) -> dict[str, Tensor]:
        """Return the stored tensors by name, on the CPU. On a meta device, only their shapes are read. Raises
        ValueError for a pickled file with anything but tensors."""
        tensors: dict[str, Tensor] = {}
        for file in self.files():
            if file.suffix != ".safetensors":
                tensors |= _unpickled(file, device)
            elif device.type == "meta":
                tensors |= {name: torch.empty(shape, device="meta") for name, shape in shapes_of([file]).items()}
            else:
                tensors |= load_file(file)
        return tensors

    def refuse(self, key: str, value: Any, wanted: Any) -> None:
        """Raise ValueError for a key of config.json with a value that our network cannot compute."""
        raise ValueError(
            f"{self.path / CONFIG}: {key} is {value!r}, but {self.kind} drafts here are only computed with {wanted!r}: "
            f"serve this draft with the engine that it was published for, or train one with draft={self.kind}"
        )

    def whole(self, key: str, value: Any, least: int) -> int:
        """Return the value of a key of config.json. Raises ValueError if it is no whole number of at least `least`."""
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{self.path / CONFIG}: {key} must be a whole number of at least {least}, not {value!r}")
        return value

    def refuse_keys(self, values: Mapping[str, Any], known: Mapping[str, Any]) -> None:
        """Raise ValueError if a key of `known` has another value in `values`. An absent key and null pass."""
        for key, wanted in known.items():
            if values.get(key) not in (None, wanted):
                self.refuse(key, values[key], wanted)


def published(path: Path) -> Published | None:
    """Return the published layout of a draft folder, or None if it has our own layout or is a causal LM. Only
    config.json is read. Raises ValueError for a config.json that is no JSON object."""
    values = read_json(path / CONFIG)
    names = _architectures(values)
    speculators = values.get("speculators_model_type")
    if speculators == "eagle3":
        return Published("an EAGLE-3 draft in the layout of speculators", "eagle", path, values, _eagle)
    if speculators:
        kind = SPECULATORS.get(speculators, "block")
        return Published(f"a draft of type {speculators} in the layout of speculators", kind, path, values, _unknown)
    if "medusamodel" in names:
        return Published("Medusa heads in the layout of vLLM", "medusa", path, values, _medusa)
    if "medusa_num_heads" in values:
        weights = "medusa_lm_head.safetensors"
        return Published("Medusa heads in their original layout", "medusa", path, values, _medusa, weights)
    if NATIVE in values:
        return None
    if "eagle3" in names:
        return Published("an EAGLE-3 draft", "eagle", path, values, _eagle)
    if "eagle" in names:
        return Published("a draft of EAGLE-1 or EAGLE-2", "eagle", path, values, _unknown)
    if "dflash" in names or "dspark" in names:
        title = "a DSpark draft" if "dspark" in names else "a DFlash draft"
        return Published(title, "block", path, values, _block)
    return None


def _architectures(values: Mapping[str, Any]) -> str:
    """Return the architectures that a config.json names, in lower case and in one text."""
    return " ".join(map(str, values.get("architectures") or ())).lower()


def kind_in(path: Path, layout: Published | None) -> str:
    """Return the kind of a draft folder by its config.json alone: that of its published layout or of our own, and
    "independent" for a causal LM. layout: of the folder, from `published`."""
    if layout:
        return layout.kind
    values = read_json(path / CONFIG)
    names = _architectures(values) if NATIVE in values else ""
    if "eagle3" in names:
        return "eagle" if values.get("pard_token") is None else "p_eagle"
    return "block" if "dflash" in names else "independent"


def imported(
    draft: Published, target: PreTrainedModel | None, dtype: torch.dtype | None = None
) -> tuple[PreTrainedModel, str]:
    """Return the network of a published draft in eval mode, on the CPU, and a line that says what it is and what the
    target gave. If the target is on the meta device, the network is too, and no tensors are read.

    target: the model to draft for; None is an error. dtype: the network's dtype; None for that of the folder.

    Raises ValueError, naming file and key or tensor, for what our network cannot compute, for tensors that are missing,
    surplus or not finite, and for shapes that config.json does not say. Raises OSError if files are missing.
    """
    if target is None:
        raise ValueError(f"{draft.path} is {draft.title}, which does not name its target: set target.path= to it")
    from inference.proposers.kinds import kind_of  # its package imports this module

    stored = draft.tensors(target.device)
    network_class = kind_of(draft.kind).network_class
    try:
        ours = draft.convert(draft, stored, target)
    except (TypeError, AttributeError, LookupError) as error:  # of a value of another type
        raise ValueError(f"{draft.path / CONFIG}: {draft.title} cannot be read from it: {error}") from error
    with building(draft.path, network_class), torch.device("meta"):
        network: PreTrainedModel = network_class(network_class.config_class(**ours.config))
    if problems := differing(network, {name: tuple(tensor.shape) for name, tensor in ours.tensors.items()}):
        raise ValueError(f"{draft.path}: {draft.title} that cannot be read here: {'; '.join(problems)}")
    own_dtype = next(tensor.dtype for tensor in ours.tensors.values() if tensor.is_floating_point())
    if target.device.type != "meta":
        tensors = {
            name: tensor.detach().cpu().to(dtype or own_dtype if tensor.is_floating_point() else None, copy=True)
            for name, tensor in ours.tensors.items()
        }
        network.load_state_dict(tensors, assign=True)
        require_sound(network, str(draft.path))
    network.config.dtype = dtype or own_dtype
    given = f"; the target gives {', '.join(ours.lacking)}" if ours.lacking else ""
    return network.eval(), f"{draft.path} is {draft.title}, read as a draft of kind {draft.kind}{given}"


def _read_pickled(file: Path, device: torch.device) -> Any:
    try:
        return torch.load(file, map_location=device, weights_only=True, mmap=True)
    except Exception as error:  # UnpicklingError, RuntimeError of a broken archive, ...
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{file} cannot be read as tensors ({reason}): save them as safetensors") from error


def _unpickled(file: Path, device: torch.device) -> dict[str, Tensor]:
    tensors = _read_pickled(file, device)
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ValueError(f"{file} must hold tensors by name, and nothing else: save them as safetensors")
    return tensors


def _unknown(draft: Published, tensors: dict[str, Tensor], target: PreTrainedModel) -> Converted:
    raise ValueError(
        f"{draft.path} is {draft.title}, which is not read here: give one of EAGLE-3 (also of speculators), DFlash or "
        "Medusa, or a causal LM with the target's tokenizer"
    )


def _layer_config(draft: Published, values: Mapping[str, Any], model_type: str) -> PretrainedConfig:
    """Return transformers' config of the draft's decoder layers, which has the defaults of keys that are left out.
    values: the part of config.json about them. model_type: of the layers, if the values do not name one."""
    named = str(values.get("model_type"))
    with building(draft.path):
        config = CONFIG_MAPPING[named if named in CONFIG_MAPPING else model_type](**values)
    draft.refuse_keys(config.to_dict(), LAYER_KEYS)
    rope = config.rope_parameters
    if rope["rope_type"] not in ANGLES or "mrope_section" in rope:
        draft.refuse("rope_scaling", rope["rope_type"], " or ".join(ANGLES))
    draft.refuse_keys(rope, {"partial_rotary_factor": 1.0})
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        draft.refuse("layer_types", "sliding_attention", "full_attention")
    if values.get("quantization_config"):
        draft.refuse("quantization_config", values["quantization_config"], None)
    return config


def _sizes(config: PretrainedConfig) -> dict[str, Any]:
    """Return the settings of our config for the sizes and special ids in transformers' config."""
    heads, rope = config.num_attention_heads, dict(config.rope_parameters)
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", heads),
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        **special_ids(config),
    }


def _eagle(draft: Published, tensors: dict[str, Tensor], target: PreTrainedModel) -> Converted:
    """Convert a draft of EAGLE-3. Layer numbers in `eagle_aux_hidden_state_layer_ids` are inputs of layers. Those in
    `eagle_config` are outputs, as SGLang and TensorRT-LLM read them, unless they are EAGLE-3's usual inputs."""
    values, lacking = draft.values, list[str]()
    inner, nested = values.get("transformer_layer_config", values), values.get("eagle_config") or {}
    config = _layer_config(draft, inner, "llama")
    draft.refuse_keys({**nested, **values}, EAGLE_KEYS)
    draft.refuse_keys(values, {"target_hidden_size": config.hidden_size})
    draft.refuse_keys(inner, {"num_hidden_layers": 1})
    if mask := {"mask_token_id", "pard_token", "ptd_token_id"} & values.keys():
        draft.refuse(mask.pop(), "an id (the mask token of P-EAGLE)", None)
    usual = list(fused(layers_of(target.config)))
    layers = list(values.get(LAYER_IDS) or [])
    if not layers and (numbers := list(nested.get(LAYER_IDS) or [])):
        layers = numbers if numbers == usual else [number + 1 for number in numbers]
    if not layers:
        layers = usual
        lacking.append(f"the layers to read, {', '.join(map(str, usual))}")
    layers = [draft.whole(LAYER_IDS, layer, 0) for layer in layers]
    tensors = renamed(tensors, {"model.": ""})
    tensors = renamed(tensors, {theirs: ours for ours, theirs in LAYER.items()})
    before = "speculators_model_type" in values  # vLLM's default for these
    return Converted(
        _sizes(config)
        | {
            "draft_vocab_size": _small_vocabulary(draft, tensors, config.vocab_size),
            LAYER_IDS: layers,
            "norm_before_residual": bool(values.get("norm_before_residual", before)),
        },
        _completed(draft, tensors, target, lacking),
        lacking,
    )


def _block(draft: Published, tensors: dict[str, Tensor], target: PreTrainedModel) -> Converted:
    """Convert a draft of DFlash, or one of DSpark that predicts no token at the anchor. Layer numbers are outputs of
    layers. One token of a block is the anchor, so a round drafts one token less than a block has. A draft without a
    head and without an embedding of the mask, as DFlash's are published, has the target's."""
    values, lacking = draft.values, list[str]()
    config, flat = _layer_config(draft, values, "qwen3"), {**values, **(values.get("dflash_config") or {})}
    spark = "DSpark" in draft.title
    if spark and flat.get("sample_from_anchor") is not False:
        draft.refuse("sample_from_anchor", flat.get("sample_from_anchor", True), False)
    draft.refuse_keys(flat, BLOCK_KEYS | ({"projector_type": "dspark"} if spark else {}))
    for key in ("target_layer_ids", "mask_token_id", "block_size"):
        if flat.get(key) is None:
            raise ValueError(f"{draft.path / CONFIG}: it has no {key}, which {draft.title} needs")
    tensors = {
        name: tensor
        for name, tensor in renamed(tensors, {"model.": ""}).items()
        if not name.startswith("confidence_head.")
    }
    if (draft.path / MASK_FILE).is_file() and "mask_embedding" not in tensors:
        stored = _read_pickled(draft.path / MASK_FILE, target.device)
        if not isinstance(stored, dict) or not isinstance(stored.get("embedding"), Tensor):
            raise ValueError(f"{draft.path / MASK_FILE} has no tensor named embedding: copy the file again")
        tensors["mask_embedding"] = stored["embedding"]
    first, mask = tensors.get("markov_head.markov_w1.weight"), draft.whole("mask_token_id", flat["mask_token_id"], 0)
    tokens, shared = _small_vocabulary(draft, tensors, config.vocab_size), {"lm_head.weight", "mask_embedding"}
    target_head = tokens == config.vocab_size and not shared & tensors.keys()
    settings = _sizes(config) | {
        "num_hidden_layers": config.num_hidden_layers,
        "draft_vocab_size": tokens,
        "target_head": target_head,
        LAYER_IDS: [draft.whole("target_layer_ids", number, 0) + 1 for number in flat["target_layer_ids"]],
        "depths": draft.whole("block_size", flat["block_size"], 2) - 1,
        "causal": bool(flat.get("causal", flat.get("is_causal", False))),
        "markov_rank": 0 if first is None else first.shape[1],
        "dflash_config": {"mask_token_id": mask},
    }
    if "mask_embedding" not in tensors:
        embedding: Any = target.get_input_embeddings()
        if mask >= len(embedding.weight):
            draft.refuse("mask_token_id", mask, f"an id below the target's {len(embedding.weight)}")
        if not target_head:
            with torch.no_grad():
                tensors["mask_embedding"] = embedding(torch.tensor([mask], device=embedding.weight.device))[0]
        lacking.append(f"the embedding of the mask token {mask}")
    return Converted(settings, _completed(draft, tensors, target, lacking, target_head), lacking)


def _small_vocabulary(draft: Published, tensors: Mapping[str, Tensor], vocabulary: int) -> int:
    """Return Vd: what config.json says, or else the number of rows of the draft's head, or V. vocabulary: V."""
    head = tensors.get("lm_head.weight")
    return int(draft.values.get("draft_vocab_size") or (vocabulary if head is None else len(head)))


def _completed(
    draft: Published,
    tensors: dict[str, Tensor],
    target: PreTrainedModel,
    lacking: list[str],
    target_head: bool = False,
) -> dict[str, Tensor]:
    """Return the tensors with the head and both tables of a pruned vocabulary, and without the embedding. Our networks
    read the target's embedding, so another one is an error. lacking: gets what the target gives. target_head: whether
    the network reads the target's head, so that no head is added."""
    tensors = {name: tensor for name, tensor in tensors.items() if "rotary_emb." not in name}
    own = tensors.pop("embed_tokens.weight", None)
    if own is not None:
        embedding: Any = target.get_input_embeddings()
        _same(draft, "embed_tokens.weight", own, embedding.weight, "embedding")
    vocabulary = target.config.get_text_config().vocab_size
    size = _small_vocabulary(draft, tensors, vocabulary)
    offsets, used = tensors.pop("d2t", None), tensors.pop("t2d", None)
    known: Tensor | None = None
    if size < vocabulary:
        if offsets is not None:
            if offsets.is_floating_point() and not offsets.is_meta:  # of which only the shape is read
                raise ValueError(f"{draft.path}: tensor d2t must hold whole numbers, not {offsets.dtype}")
            known = torch.arange(len(offsets), device=offsets.device) + offsets
        elif used is None:
            raise ValueError(
                f"{draft.path}: its head has {size} of {vocabulary} tokens, and neither tensor d2t nor t2d says which: "
                "get the whole draft"
            )
        else:
            known = torch.empty(size, dtype=torch.int64, device="meta") if used.is_meta else used.nonzero()[:, 0]
        if not known.is_meta:
            refuse_ids(known, vocabulary, f"{draft.path}: tensor d2t")
        tensors["d2t"] = known - torch.arange(len(known), device=known.device)
        if used is None:
            used = torch.zeros(vocabulary, dtype=torch.bool, device=known.device).index_fill_(0, known, True)
        tensors["t2d"] = used.bool()
    elif offsets is not None and not offsets.is_meta and bool(offsets.any()):
        raise ValueError(f"{draft.path}: its head has all {vocabulary} tokens, but tensor d2t moves some of them")
    if "lm_head.weight" not in tensors:
        if not target_head:
            head: Any = target.get_output_embeddings()
            rows = head.weight[:vocabulary]
            tensors["lm_head.weight"] = rows if known is None else rows[known.to(rows.device)]
        lacking.append("lm_head")
    return tensors


def _same(draft: Published, name: str, own: Tensor, theirs: Tensor, part: str) -> None:
    """Raise ValueError if a tensor of the draft is not the target's `part`, up to rounding. Rows of padding are not
    compared, and neither is anything on the meta device."""
    if own.is_meta or theirs.is_meta:
        return
    rows = min(len(own), len(theirs))
    a, b = own[:rows].float(), theirs[:rows].detach().cpu().float()
    if a.shape != b.shape or not bool((a - b).abs().max() <= CLOSE * b.abs().max()):
        raise ValueError(
            f"{draft.path}: tensor {name} is not the target's {part}, but {draft.kind} drafts here read the target's: "
            "give the target that the draft was made for, or serve it with the engine that it was published for"
        )


def _medusa(draft: Published, tensors: dict[str, Tensor], target: PreTrainedModel) -> Converted:
    """Convert Medusa heads. Their logits come from the target's head here, so heads with another one are an error."""
    values, vllm = draft.values, "medusa_num_heads" not in draft.values
    keys = ("num_heads", "num_hidden_layers") if vllm else ("medusa_num_heads", "medusa_num_layers")
    heads, blocks = (int(values.get(key) or 1) for key in keys)
    text = target.config.get_text_config()
    if vllm:
        draft.refuse_keys(values, {"truncated_vocab_size": values.get("vocab_size")})
    config = {
        "hidden_size": values.get("hidden_size", text.hidden_size),
        "vocab_size": values.get("vocab_size", text.vocab_size),
        "num_heads": heads,
        "num_hidden_layers": blocks,
    }
    tensors, pattern, parts = dict(tensors), MEDUSA if vllm else ORIGINAL, dict[str, Tensor]()
    for part in ("weight", "bias"):
        names = [[pattern.format(head, block, part) for block in range(blocks)] for head in range(heads)]
        absent = [name for row in names for name in row if name not in tensors]
        if part == "bias" and len(absent) == heads * blocks:
            parts[part] = torch.zeros_like(parts["weight"][..., 0])
            continue
        if absent:
            raise ValueError(f"{draft.path}: tensor {absent[0]} is missing: get the whole draft")
        parts[part] = torch.stack([torch.stack([tensors.pop(name) for name in row]) for row in names])
    theirs: Any = target.get_output_embeddings()
    for name in [*tensors]:
        if name in {f"lm_heads.{head}.weight" if vllm else f"{head}.{blocks}.weight" for head in range(heads)}:
            _same(draft, name, tensors.pop(name), theirs.weight, "output head")
    return Converted(config, parts | tensors, ["the output head"])
