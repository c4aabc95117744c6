"""An independent draft: a small causal LM that reads only the text, and no states of the target.

It begins with random weights (init=scratch), layers of the target (init=target_layers), or the weights of any Hugging
Face model (init=pretrained; `transplant` has init=transplant). Drafts of other kinds begin with a draft folder through
`pretrained_network`.

For an encoder-decoder, init=target_layers gives a draft with some of the decoder's layers. Its encoder is the target's,
which is frozen and has already read the input, or a trainable copy of its first layers (draft.encoder_layers=). With
init=scratch the draft has no encoder and reads only the decoder's text.

B texts, T tokens, V vocabulary, D width of the draft's states.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedModel

from cotrain.config.drafts import Draft
from cotrain.config.groups import Init
from cotrain.errors import warn
from cotrain.losses.guess import Pruned
from cotrain.ranks import rank
from cotrain.students.base import ANY, DEFAULT, SHAPE, Guess, Seen, Student, refuse_keys
from cotrain.teacher.target_model import ENCODER, halves, keeps_apart, split, unavailable
from inference.drafts.causal_lm import CausalLM
from inference.drafts.draft_folder import read
from inference.drafts.published import Published, imported, published
from inference.drafts.weight_files import CONFIG, differing, require_finite, require_sound, shapes_of, weight_files
from inference.models.encoder_decoder import refuse_other_sources, same_encoder
from inference.models.markov import remove_markov_head
from inference.models.pretrained import (
    TIED,
    auto_class,
    head_weight,
    layers_of,
    length_of,
    refuse_unsupported,
    special_ids,
    weights_quantisation,
    whole_tensor,
)
from inference.models.small_heads import RANK, VOCABULARY, SmallHead, is_small, put_small_head
from inference.proposers import kind_of

ROPES = ("default", "linear", "dynamic", "llama3", "yarn")  # rotary settings that fit any head size
HEAD = ("head_rank", "vocabulary")  # settings of a small head
LAYERS = (("num_layers", "num_decoder_layers"), ("encoder_layers", "decoder_layers"))  # config keys: of T5, of BART
# transformers' caches have as many layers as this key says, and for T5 without it as many as the encoder has
CACHED = "decoder_layers"
ENCODERS = ("encoder.", "model.encoder.")  # names of an encoder's tensors begin so
BIAS = "relative_attention_bias"
DROPOUT = (
    "dropout_rate",
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "encoder_layerdrop",
    "decoder_layerdrop",
)
COPIES = {"embed_tokens.weight"}  # a copy of the target's tensor, which other programs write into draft folders


class IndependentStudent(Student):
    """Trains the draft that `inference.proposers.independent` serves. It makes one guess, whose distribution is the
    same at every depth (Leviathan et al. 2023, arXiv 2211.17192)."""

    kind = DEFAULT
    begins_with: tuple[str, ...] = ("hybrid", "parallel")
    sourced = True

    def prepare(self) -> None:
        self.read, self.head = halves(self.network, self.vocabulary)
        if self.target is not None and shares_encoder(self.network, self.target):
            self.reads = (ENCODER,)
            self.network.get_encoder().requires_grad_(False)

    @classmethod
    def initial(cls, draft: Draft, init: Init, target: PreTrainedModel) -> PreTrainedModel:
        """Return the network before training. Raises ValueError, which names the key to change."""
        if init.kind == "scratch":
            network = scratch(target, **_sizes(draft))
        elif init.kind == "target_layers":
            network = from_layers(target, init.layers, draft.encoder_layers)
        else:
            network = causal_lm(checked_path(cls, draft), target)
            refuse_other_sources(network, target, f"draft.path={draft.path}")
            if "markov" not in type(draft).model_fields:
                remove_markov_head(network)
        if init.kind != "target_layers" or not target.config.is_encoder_decoder:
            refuse_keys(draft, "encoder_layers")
        if network.config.is_encoder_decoder:
            refuse_keys(draft, *HEAD)
            return network
        return with_small_head(network, draft, head_weight(target if init.kind == "scratch" else network))

    def refuse(self) -> None:
        """Raise ValueError if the network's head does more than project, cap or scale its states."""
        split(self.network, self.vocabulary)

    def keeps_apart(self) -> bool:
        return keeps_apart(self.network, self.read)

    @property
    def small(self) -> SmallHead | None:
        """Return the network's head if it is a small one (of low rank or with a pruned vocabulary), otherwise None."""
        head = self.network.get_output_embeddings()
        return head if isinstance(head, SmallHead) else None

    @property
    def known(self) -> Tensor:
        every = super().known
        if self.small is None or self.small.known is None:
            return every
        known = self.small.known.cpu()
        return torch.zeros_like(every).index_fill(0, known[known < len(every)], True)

    @property
    def pruned(self) -> Pruned | None:
        """Return the part of a pruned head that has finite logits, or None for a whole vocabulary."""
        if self.small is None or self.small.known is None:
            return None
        return self.pruned_to(self.small.known, self.small.projection, self.vocabulary or self.small.size)

    @property
    def undecided(self) -> bool:
        return self.small is not None and self.small.undecided

    def know(self, counts: Tensor) -> None:
        """Choose the most frequent tokens as the draft's vocabulary, and copy their rows from the draft's initial head,
        in place. counts (V,): how often each id occurs in the texts."""
        if self.small is not None and self.small.known is not None:
            top = counts[: self.vocabulary].topk(len(self.small.known)).indices
            self.largest = None
            self.small.know(sorted(top.tolist()))

    def guesses(self, batch: Mapping[str, Any], seen: Seen) -> list[Guess]:
        if not self.network.config.is_encoder_decoder:
            return [self.everywhere(self.read(batch["ids"], batch.get("position_ids")))]
        encoder = seen.states[ENCODER].to(self.network.dtype) if ENCODER in self.reads else None
        return [self.everywhere(self.read(batch["ids"], source=batch["source"], encoder=encoder))]

    def everywhere(self, states: Tensor, depth: int = ANY) -> Guess:
        """Return the head's guess at every position, from states (B, T, D). depth: the guess's depth (0-based); ANY:
        the same at every depth."""
        parameters = tuple(self.network.get_output_embeddings().parameters())
        return Guess.everywhere(states, self.head, parameters, depth, self.pruned)


def _sizes(draft: Draft) -> dict[str, int]:
    """Return the sizes in draft.*, keyed as the arguments of `scratch`. Raises ValueError for a size that is null."""
    sizes = {key: getattr(draft, key) for key in SHAPE}
    for key, size in sizes.items():
        if size is None:
            raise ValueError(
                f"draft.{key}=null: a draft with random weights needs a number, for example "
                f"draft.{key}={type(draft).model_fields[key].default}"
            )
    return sizes


def scratch(
    target: PreTrainedModel, width: int, layers: int, intermediate: int, head_dim: int, kv_heads: int
) -> PreTrainedModel:
    """Return a Llama with random weights, and with the target's vocabulary, context length, rotary settings and special
    ids.

    width, intermediate, head_dim: width of the states, of feed-forward layers and of a head. kv_heads: number of key
    heads. Rotary settings are left out if they fit only one head size (lists of factors) or differ between layers.
    Raises ValueError if head_dim does not divide width, or if kv_heads does not divide the number of heads.
    """
    if width % head_dim:
        raise ValueError(f"draft.width={width}: it is not a multiple of draft.head_dim={head_dim}: change one of them")
    if width // head_dim % kv_heads:
        raise ValueError(
            f"draft.kv_heads={kv_heads}: it does not divide the number of heads, draft.width / draft.head_dim = "
            f"{width // head_dim}: set draft.kv_heads=1 or another divisor"
        )
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
        max_position_embeddings=length_of(theirs),
        rope_parameters=dict(rope) if rope.get("rope_type") in ROPES else None,
        tie_word_embeddings=True,
        **special_ids(theirs),
    )
    return LlamaForCausalLM(config)


def with_small_head(network: PreTrainedModel, draft: Draft, rows: Tensor) -> PreTrainedModel:
    """Put the head that draft.vocabulary and draft.head_rank describe on the causal LM `network`, in place, and return
    it. It is unchanged if both are null.

    rows (V, D): the weight of a whole head. The new head begins as these rows, cut to its vocabulary and then
    decomposed; or at random, if D is not the draft's width. Raises ValueError, which names the key, for a vocabulary or
    rank above the whole head's, and for a network that already has a small head of other sizes or that cannot have one.
    """
    config = network.config.get_text_config()
    refuse_sizes(draft, config.vocab_size, config.hidden_size)
    wanted: dict[str, Any] = {VOCABULARY: draft.vocabulary, RANK: draft.head_rank}
    if is_small(network.config):  # of draft.path
        for key, (name, value) in zip(HEAD[::-1], wanted.items(), strict=True):
            if value not in (None, own := getattr(network.config, name, None)):
                raise ValueError(
                    f"draft.{key}={value}: draft.path={draft.path} has a small head with {name} {own}; "
                    f"set draft.{key}=null"
                )
        return network
    if draft.vocabulary == config.vocab_size:
        wanted[VOCABULARY] = None
    if any(wanted.values()):
        network.config.update(wanted)
        try:
            head = put_small_head(network)
        except ValueError as error:
            raise ValueError(f"draft.vocabulary, draft.head_rank: {error}") from error
        head.begin(rows if rows.shape[1] == config.hidden_size else None)
    return network


def refuse_sizes(draft: Draft, vocabulary: int, width: int) -> None:
    """Raise ValueError if draft.vocabulary or draft.head_rank exceeds the sizes of the whole head's weight (vocabulary,
    width)."""
    if draft.vocabulary and draft.vocabulary > vocabulary:
        raise ValueError(
            f"draft.vocabulary={draft.vocabulary}: the vocabulary has only {vocabulary} tokens: set "
            "draft.vocabulary=null for all of them"
        )
    most = min(draft.vocabulary or vocabulary, width)
    if draft.head_rank and draft.head_rank > most:
        raise ValueError(
            f"draft.head_rank={draft.head_rank}: it exceeds {most}, the smaller size of the head: set "
            "draft.head_rank=null for a whole head"
        )


@torch.no_grad()
def shares_encoder(draft: PreTrainedModel, target: PreTrainedModel) -> bool:
    """Return whether the draft's encoder has the same weights as the target's; their dtypes may differ."""
    return same_encoder(draft, target, as_run=False)


def from_layers(target: PreTrainedModel, layers: Sequence[int], encoder_layers: int | None = None) -> PreTrainedModel:
    """Return a copy of the target in float32 with only some of its decoder layers, and with its embeddings, final norm
    and head (depth pruning).

    layers: indices of decoder layers (0-based); negative ones count from the end. encoder_layers: for an
    encoder-decoder, how many of its first encoder layers are copied; None: all. Raises ValueError for an index that
    does not exist, and for an architecture whose layers are not named `layers.N`, `h.N` or `block.N`.
    """
    total, encodes = layers_of(target.config), target.config.is_encoder_decoder
    if any(not -total <= layer < total for layer in layers) or not layers:
        raise ValueError(
            f"init.layers={list(layers)}: the target has {total} layers: name one or more of 0 to {total - 1}"
        )
    chosen = [layer % total for layer in layers]
    config = copy.deepcopy(target.config)
    if encodes:
        _shape_decoder(config, len(chosen), encoder_layers)
    else:
        config.num_hidden_layers = len(chosen)
    if settings := weights_quantisation(config):
        config.tie_word_embeddings = settings.get(TIED, config.tie_word_embeddings)
        del config.quantization_config  # a draft trains in full precision
    kinds = config.to_dict().get("layer_types")
    if kinds:
        config.layer_types = [kinds[layer] for layer in chosen]
    draft = auto_class(config).from_config(config, dtype=torch.float32)
    source, state = plain_tensors(target), {}
    for name, value in draft.state_dict().items():
        # the encoder's first layers stay, and so does T5's position bias, which only a first layer has
        stays = encodes and (name.startswith(ENCODERS) or BIAS in name)
        origin = name if stays else _renumber(name, chosen)
        if origin not in source or source[origin].shape != value.shape:
            raise ValueError(
                f"init=target_layers: the target has no tensor {origin} with the shape of the draft's {name}: set "
                "init=scratch"
            )
        state[name] = source[origin].to(value.dtype)
    draft.load_state_dict(state, assign=next(iter(state.values())).is_meta)
    draft.tie_weights()
    if (settings or {}).get(TIED):  # the target's head is a rounded copy of its embeddings; the draft has one tensor
        with torch.no_grad():
            draft.get_input_embeddings().weight.copy_(target.get_input_embeddings().weight)
    return draft


def _shape_decoder(config: PretrainedConfig, layers: int, encoder_layers: int | None) -> None:
    """Set the numbers of decoder layers (`layers`) and encoder layers in an encoder-decoder's config, in place, and
    turn dropout off. encoder_layers: None keeps the encoder's number. Raises ValueError if it is not less than this
    number."""
    keys = next(keys for keys in LAYERS if getattr(config, keys[1], None))
    most = getattr(config, keys[0])
    if (
        encoder_layers is not None and encoder_layers >= most
    ):  # all of them would be the target's encoder, which is frozen
        raise ValueError(
            f"draft.encoder_layers={encoder_layers}: the target's encoder has {most} layers, and a copy that learns "
            "has fewer: set a lower number, or null to share the target's encoder"
        )
    new = {keys[0]: encoder_layers or most, keys[1]: layers, CACHED: layers}
    config.update(new | _no_dropout(config))


def _no_dropout(config: PretrainedConfig) -> dict[str, float]:
    """Return the entries of an encoder-decoder's config that turn its dropout off."""
    return {key: 0.0 for key in DROPOUT if getattr(config, key, None)}


def plain_tensors(target: PreTrainedModel) -> dict[str, Tensor]:
    """Return the target's tensors by name. Weights that bitsandbytes has quantised are dequantised, and the changes of
    active adapters are added to the weights."""
    stored = target.state_dict()  # on a CPU this also unpacks 4-bit weights
    state = {name: whole_tensor(target, name, tensor) for name, tensor in stored.items()}
    for name, weight in target.named_parameters():
        kind = type(weight).__name__
        if kind in ("Params4bit", "Int8Params"):
            from transformers.integrations.bitsandbytes import dequantize_bnb_weight

            layer = target.get_submodule(name.rpartition(".")[0])
            state[name] = dequantize_bnb_weight(weight, state=layer.state if kind == "Int8Params" else None)
    return _merged(target, state) if getattr(target, "peft_config", None) else state  # set by peft alone


@torch.no_grad()
def _merged(target: PreTrainedModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the target's tensors by the names that they have without adapters, with the changes of the active adapters
    added. state: the tensors by name, adapters included."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    merged = {name.replace(".base_layer.", "."): value for name, value in state.items()}
    for name, layer in target.named_modules():
        if isinstance(layer, BaseTunerLayer):
            deltas: Any = layer
            for adapter in layer.active_adapters:
                merged[f"{name}.weight"] = merged[f"{name}.weight"] + deltas.get_delta_weight(adapter)
    return merged


def _renumber(name: str, chosen: Sequence[int]) -> str:
    """Return the target's name for a parameter of the draft: `model.layers.0.x` gives `model.layers.N.x` with N =
    chosen[0]. name: the draft's name. chosen: for each layer of the draft, the target's layer (0-based)."""
    parts = name.split(".")
    for at in range(1, len(parts)):
        if parts[at].isdigit() and parts[at - 1] in ("layers", "h", "block"):
            parts[at] = str(chosen[int(parts[at])])
            break
    return ".".join(parts)


def causal_lm(path: str, target: PreTrainedModel) -> PreTrainedModel:
    """Return any causal LM from a folder or hub id, in float32. Its vocabulary rows past the target's are cut off.

    A model with fewer rows keeps them: models of one family are padded to different sizes, and the engine gives no mass
    to ids for which a draft has no row. If the target is on the meta device, which stores no weights, the returned
    model is too.

    Raises ValueError for a model with a small head or Markov head for more ids than the target has, and as `read_lm`
    does.
    """
    theirs, config = target.config.get_text_config().vocab_size, config_of(path)
    ours = config.get_text_config().vocab_size
    if ours > theirs and CausalLM.has_parts(config):
        raise ValueError(
            f"draft.path={path}: its small head or Markov head has {ours} ids, but the target has {theirs}: set "
            "target.path= to the target that this draft was made for"
        )
    return read_lm(path, config, target.device, min(ours, theirs))


def read_lm(path: str, config: PretrainedConfig, device: torch.device, rows: int) -> PreTrainedModel:
    """Return the causal LM or encoder-decoder of a folder or hub id, in float32. config: its own. rows: the number of
    ids that it has afterwards. device: the target's; on the meta device, which stores no weights, the returned model is
    too.

    Raises ValueError for tensors that are missing or not finite, for wrong ids in a pruned head, and for a model that
    the engine cannot run.
    """
    ours = config.get_text_config().vocab_size
    options: dict[str, Any] = {}
    if config.is_encoder_decoder:
        config.update(_no_dropout(config))
        options["config"] = config
    if device.type == "meta":
        config.get_text_config().vocab_size = rows
        with torch.device("meta"):
            sketch = cast(PreTrainedModel, CausalLM(config))
        try:
            refuse_unsupported(sketch, sketch.config.get_text_config())
        except ValueError as error:
            raise ValueError(f"draft.path={path}: {error}") from error
        return sketch
    loaded: Any = CausalLM.from_pretrained(
        path, dtype=torch.float32, use_safetensors=True, output_loading_info=True, **options
    )
    model, info = loaded
    if info["missing_keys"]:
        raise ValueError(
            f"draft.path={path}: tensors are missing: {', '.join(sorted(info['missing_keys']))}: name a complete model"
        )
    if info["mismatched_keys"]:
        names = ", ".join(sorted(str(name) for name, *_ in info["mismatched_keys"]))
        raise ValueError(
            f"draft.path={path}: its config.json is not for these weights: replace it; shapes differ in {names}"
        )
    require_sound(model, f"draft.path={path}")
    if rows != ours:
        model.resize_token_embeddings(rows)
    return model


def refuse_fewer(network: PreTrainedModel, ids: int, where: str) -> None:
    """Raise ValueError if the draft `network` has logits for fewer ids than its tokenizer has. ids: the number of the
    tokenizer's ids. where: the beginning of the message, a setting such as "draft.path=X"."""
    if (rows := network.config.get_text_config().vocab_size) < ids:
        raise ValueError(
            f"{where}: the draft has logits for {rows} ids, but the tokenizer has {ids} ids: use a model of the "
            "target's family"
        )


def config_of(path: str) -> PretrainedConfig:
    """Return the config of a model folder or hub id. Raises ValueError, which names draft.path, if there is none."""
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"draft.path: {path} is no model folder, and {unavailable(error)}") from error


def pretrained_network(student: type[Student], draft: Draft, target: PreTrainedModel) -> Any:
    """Return the network with the weights in the folder draft.path=, in float32. If the target is on the meta device,
    which stores no weights, the network is too. student: the class of the kind of draft to train.

    The names and shapes of the folder's tensors are compared with its config.json before any tensor is read. Raises
    ValueError, which names draft.path=, if it is null, for a folder of another kind or for a target of other sizes, and
    for tensors that are missing, superfluous, not finite or of other shapes than config.json says.
    """
    path = checked_path(student, draft)
    kind, where = kind_of(student.kind), f"draft.path={path}"
    if not Path(path).is_dir():
        raise ValueError(f"{where}: no such folder: with init=pretrained name the folder of a {student.kind} draft")
    if layout := published(Path(path)):
        network = published_network(layout, target)
    else:
        network = _load(student, kind.network_class, Path(path), target.device)
    kind.fits(network, target, where)
    return network


def published_network(layout: Published, target: PreTrainedModel) -> PreTrainedModel:
    """Return the network of draft.path=, a folder in a published layout, in float32. If the target is on the meta
    device, the network is too, and a line is printed that says what the folder is. Raises ValueError, which names
    draft.path, for what our network cannot compute and for missing or wrong files."""
    try:
        network, line = imported(layout, target, torch.float32)
    except (ValueError, OSError) as error:
        raise ValueError(f"draft.path: {error}") from error
    if target.device.type == "meta" and not rank():
        warn(f"draft.path: {line}")
    return network


def checked_path(student: type[Student], draft: Draft, init: str = "pretrained") -> str:
    """Return draft.path. Raises ValueError if it is null, or if the kind of the draft in this folder is neither the
    student's nor, with init=pretrained, one that it can begin with (`Student.begins_with`). init: the value of
    init=."""
    path = draft.path
    if not path:
        raise ValueError(f"init={init}: it takes its weights from a folder or hub id: name one with draft.path=")
    if Path(path).is_dir():
        folder = read(path)
        alone = folder.layout or init != "pretrained"
        kinds = (student.kind,) if alone else (student.kind, *student.begins_with)
        if (folder.metadata or folder.layout) and folder.kind not in kinds:
            raise ValueError(
                f"draft.path={path}: a draft of kind {folder.kind}, but draft={student.kind} can only begin with one "
                f"of kind {', '.join(kinds)}: name such a folder, or set draft={folder.kind}"
            )
    return path


def _load(student: type[Student], network_class: Any, path: Path, device: torch.device) -> PreTrainedModel:
    """Return the network that the folder's config.json describes, with the folder's tensors. device: the target's; on
    the meta device no tensors are read. Raises ValueError for a wrong config.json or wrong tensors."""
    try:
        config = network_class.config_class.from_pretrained(path)
    except (StrictDataclassError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"draft.path={path}: its {CONFIG} is not for a {student.kind} draft ({reason}): name a folder of this kind"
        ) from error
    with torch.device("meta" if device.type == "meta" else "cpu"):
        network: PreTrainedModel = network_class(config)
    metadata, files = read(path).metadata, weight_files(path)
    optional = frozenset() if metadata is not None and metadata.kind == student.kind else student.fresh
    if problems := differing(network, shapes_of(files), optional, COPIES):
        raise ValueError(f"draft.path={path}: {'; '.join(problems)}")
    if device.type != "meta":
        for file in files:
            network.load_state_dict(load_file(file), strict=False)
        require_finite(network, f"draft.path={path}")
    return network
