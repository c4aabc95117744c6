"""The frozen target as a teacher: loaded in the precision in which it is served, and split into a body and a head.

B texts, T tokens, S tokens of an encoder input, D width, V vocabulary, n positions.
"""

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from torch import Tensor
from torch.nn.functional import pad
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    masking_utils,
)
from transformers import __version__ as transformers_version
from transformers.masking_utils import find_packed_sequence_indices

from cotrain.data.texts import columns_of
from cotrain.errors import warn
from cotrain.losses.guess import sent
from cotrain.ranks import local_rank
from inference.drafts.bundled_target import UNREACHED, refuse_missing, resolve
from inference.drafts.compatibility import ADAPTER
from inference.drafts.draft_folder import load_tokenizer
from inference.drafts.weight_files import CONFIG, json_if_any, weight_files
from inference.models.llama import INT8_ROWS, in_int8_rows
from inference.models.passes import LAST
from inference.models.pretrained import auto_class, head_of, id_of, layers_of, tapped, weights_quantisation, widened
from inference.models.quantisation import options_of, refuse_quantisation, unpack

# ids (B, T), position_ids (B, T) or None, source (B, S) or None -> last hidden states (B, T, D). A model with an
# encoder reads `source`, padded with negative ids, or takes the encoder's states (B, S, D) of it as `encoder`.
Read = Callable[..., Tensor]
Head = Callable[[Tensor], Tensor]  # (n, D) -> logits (n, V)
Record = Mapping[int, Tensor]  # layer -> states (B, T, D)
# ids (B, T), position_ids (B, T) or None, source (B, S) or None, length (B,) or None -> their record. What is after
# `length`, the number of each row's tokens, is padding; a model reads it too, since no token attends to a later one.
Reader = Callable[..., Record]
ENCODER = -2  # layer number of the encoder's states (B, S, D), whose columns past a source have no meaning


@dataclass(frozen=True)
class Seen:
    """The target's states for a batch of texts, as a student may read them.

    states: layer -> (B, T, D). Layer 0 is the embeddings, layer i the residual stream after i decoder layers, and LAST
    the input of the head. ENCODER is the encoder's states (B, S, D).
    """

    states: Mapping[int, Tensor]


def require_whole(model: PreTrainedModel, path: str, info: Mapping[str, Any]) -> None:
    """Raise ValueError if weights of a model are missing or not finite; those without storage are not looked at. path:
    the model's folder or hub id. info: what transformers says about its loading."""
    if info["missing_keys"]:
        raise ValueError(
            f"target.path: {path} is incomplete, name a whole model: missing {', '.join(sorted(info['missing_keys']))}"
        )
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and not weight.is_meta and not bool(torch.isfinite(weight).all()):
            raise ValueError(
                f"target.path: {path} has NaN or infinite weights in {name}: name another model, or set "
                "target.dtype=float32"
            )


def load_target(
    path: str,
    quantisation: str = "none",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    adapter: str | None = None,
    device_map: str | None = None,
) -> PreTrainedModel:
    """Return a frozen target from a folder or hub id, read only from safetensors files.

    quantisation: of the weights; "none" leaves them unchanged. A quantised checkpoint stays quantised.
    dtype: "auto" means the checkpoint's dtype, or float32 if the CPU would emulate it.
    adapter: the folder of a PEFT adapter, which is merged into the weights unless these are quantised; None for none.
    device_map: "auto" spreads the layers over this machine's GPUs and its memory (accelerate); "cpu"; None: the GPU of
    this process, or the CPU if there is no GPU.

    Raises ValueError for an unknown quantisation, for a second quantisation of a quantised checkpoint, for weights that
    are missing or not finite (those that device_map leaves in other memory are not looked at), and for an adapter that
    cannot be loaded.
    """
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    refuse_quantisation(path, quantisation, config)
    loaded: Any = auto_class(config).from_pretrained(
        path,
        dtype=dtype,
        use_safetensors=True,
        trust_remote_code=trust_remote_code,
        **options_of(quantisation),
        device_map=device_map or (f"cuda:{local_rank()}" if torch.cuda.is_available() else "cpu"),
        output_loading_info=True,
    )
    model, info = loaded
    require_whole(model, path, info)
    if model.get_input_embeddings().weight.is_meta:
        raise ValueError(
            f"target.device_map: the GPUs are too small for the embeddings of {path}: leave out target.device_map="
        )
    unpack(model)
    own = model.dtype
    if dtype == "auto" and not torch.cuda.is_available() and widened(model).dtype != own:
        dtype = str(own).removeprefix("torch.")
        warn(f"this CPU is slow in {dtype}, so the target runs in float32")
    if adapter:  # before rows are rounded: the kernel then runs the merged weights
        model = adapted(model, adapter)
    if quantisation == INT8_ROWS:
        in_int8_rows(model)
    return model.eval().requires_grad_(False)


def adapted(model: PreTrainedModel, adapter: str) -> PreTrainedModel:
    """Return the target `model` with a PEFT adapter, as it is served: merged into the weights, or unmerged if these are
    quantised.

    adapter: the adapter's folder. Raises ValueError if peft is not installed, for a pickled adapter, and for a folder
    without an adapter for this target.
    """
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ValueError("target.adapter: it needs peft: pip install 'cotrain[adapter]'") from error
    if Path(adapter).is_dir() and not (Path(adapter) / ADAPTER[1]).is_file():
        raise ValueError(
            f"target.adapter: {adapter} has no {ADAPTER[1]}: save the adapter in this format, since pickled files are "
            "not read"
        )
    try:
        if weights_quantisation(model.config):
            model.load_adapter(adapter)
            return model.eval().requires_grad_(False)
        merged: Any = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    except (ValueError, RuntimeError, OSError) as error:
        raise ValueError(f"target.adapter: {adapter} is not an adapter of this target: {error}") from error
    return merged.eval().requires_grad_(False)


def load_config(
    path: str, trust_remote_code: bool = False, key: str = "target.path"
) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """Return a model's config and tokenizer, without reading its weights.

    path: a folder, a hub id, or "bundled" for the target that ships with this package. key: the setting that names the
    model, for messages. Raises ValueError or OSError, which names the key or file, for a missing model or tokenizer.
    """
    tokenizer = load_words(path, trust_remote_code, key)
    folder = Path(resolve(path))
    values = json_if_any(folder / CONFIG)
    kind = values.get("model_type")
    if values and kind not in CONFIG_MAPPING and "auto_map" not in values:
        raise ValueError(
            f"{key}: {path} has the model_type {kind!r}, which transformers {transformers_version} does not know: "
            "install a newer version, or name another model"
        )
    config = AutoConfig.from_pretrained(resolve(path), trust_remote_code=trust_remote_code)
    try:
        auto_class(config)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
    return config, tokenizer


def load_words(path: str, trust_remote_code: bool = False, key: str = "target.path") -> PreTrainedTokenizerBase:
    """Return a model's tokenizer, without reading its weights. path: a folder, a hub id, or "bundled" for the target
    that ships with this package. key: the setting that names the model, for messages. Raises ValueError or OSError,
    which names the key or file, for a missing model or tokenizer."""
    name = resolve(path, key)
    folder = Path(name)
    if folder.is_dir():
        try:
            json_if_any(folder / CONFIG)  # raises for a broken file
            tokenizer = load_tokenizer(folder, trust_remote_code)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
        if not (folder / CONFIG).is_file():
            adapter = "; an adapter is named by target.adapter=, and its model by target.path="
            raise ValueError(
                f"{key}: {path} is not a model folder: it has no {CONFIG}{adapter * (folder / ADAPTER[0]).is_file()}"
            )
    else:
        if folder.is_file():
            raise ValueError(f"{key}: {name} is a file: give the folder of a model, or a .gguf file")
        refuse_missing(key, name)
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            raise ValueError(f"{key}: {name} is no folder, and {unavailable(error)}") from error
    if tokenizer is None:
        raise ValueError(
            f"{key}: {path} has no tokenizer files (tokenizer.json, tokenizer_config.json): copy the model's into it"
        )
    return tokenizer


def unavailable(error: Exception) -> str:
    """Return, in words, why a model on the hub could not be read. error: the exception from transformers."""
    if constants.HF_HUB_OFFLINE:
        return UNREACHED
    return f"the hub has no such model: {str(error).strip().splitlines()[0]}"


def load_pair(
    path: str,
    quantisation: str = "none",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    adapter: str | None = None,
    device_map: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the frozen target and its tokenizer.

    path: a folder, a hub id, or "bundled" for the target that ships with this package. quantisation: of the weights;
    "none" leaves them unchanged. dtype: "auto" means the checkpoint's dtype. adapter: the folder of a PEFT adapter, or
    None. device_map: see `load_target`.

    Raises ValueError or OSError, which names the key or file, for a missing or damaged model, tokenizer or adapter, and
    for a quantisation that the checkpoint cannot have.
    """
    folder = resolve(path)
    if Path(folder).is_dir():
        weight_files(Path(folder))
    _, tokenizer = load_config(path, trust_remote_code)
    return load_target(folder, quantisation, dtype, trust_remote_code, adapter, device_map), tokenizer


def split(model: PreTrainedModel, vocabulary: int | None = None) -> tuple[Read, Head]:
    """Return the two parts of a model: a body, ids (B, T) -> last hidden states (B, T, D), and a head, states (..., D)
    -> logits (..., V). Raises ValueError if the head does more than project, cap or scale. This is tested on a few ids:
    the logits of both parts together must equal the model's own.

    The body also takes position_ids (B, T). A text begins at each position id that does not follow the one before it;
    for models that `keeps_apart` accepts, attention stays within a text. An encoder-decoder's body also takes source
    (B, S), the encoder input.

    vocabulary: V, the number of ids that can have mass; later rows of the head are padding. None: all ids.
    """
    hidden, logits = halves(model, vocabulary)
    _compare(model, hidden, logits)
    return hidden, logits


@torch.no_grad()
def _compare(model: PreTrainedModel, hidden: Read, logits: Head) -> None:
    """Raise ValueError if body and head together give other logits than the model."""
    training = model.training
    model.eval()  # dropout would make any two passes differ
    ids = torch.arange(min(8, model.config.get_text_config().vocab_size), device=model.device).unsqueeze(0)
    source = {"source": ids} if model.config.is_encoder_decoder else {}
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if source else {})
    halves, whole = logits(hidden(ids, **source)).float(), model(**inputs, use_cache=False).logits.float()
    whole = whole[..., : halves.shape[-1]]
    model.train(training)
    if not torch.allclose(halves, whole, rtol=1e-2, atol=1e-2):
        raise ValueError(
            f"{type(model).__name__}: its head does more than a projection, so losses cannot be computed in chunks: "
            "use a model of another family"
        )


def halves(model: PreTrainedModel, vocabulary: int | None = None) -> tuple[Read, Head]:
    """Return the two parts of a model: a body, ids (B, T) -> last hidden states (B, T, D), and a head, states (..., D)
    -> logits (..., V). Unlike `split`, it does not test whether both together compute the model's logits.

    vocabulary: V, the number of ids that can have mass; None: all ids.
    """
    head = head_of(model)

    def hidden(
        ids: Tensor, position_ids: Tensor | None = None, source: Tensor | None = None, encoder: Tensor | None = None
    ) -> Tensor:
        if model.config.is_encoder_decoder:
            return decoder_outputs(model, ids, source, encoder).last_hidden_state
        return _read(model, ids, position_ids)

    def logits(states: Tensor) -> Tensor:
        return head(states)[..., :vocabulary]

    return hidden, logits


def _read(model: PreTrainedModel, ids: Tensor, position_ids: Tensor | None) -> Tensor:
    """Return the last hidden states (B, T, D) of a causal LM's body for ids (B, T). position_ids (B, T), on the CPU;
    None: each row is one text."""
    masking_utils.find_packed_sequence_indices = _known_texts  # transformers calls it by its name in the module
    asked = _texts.set((None if position_ids is None else find_packed_sequence_indices(position_ids),))
    positions = {} if position_ids is None else {"position_ids": sent(position_ids, model.device)}
    try:
        output = model.base_model(input_ids=sent(ids, model.device), use_cache=False, **positions)
        states: Tensor = output.last_hidden_state.to(model.device)  # the last layer may be on another device
        return states
    finally:
        _texts.reset(asked)


_texts: ContextVar[tuple[Tensor | None] | None] = ContextVar("texts", default=None)


def _known_texts(position_ids: Tensor) -> Tensor | None:
    """Return (B, T): the number of each token's text in its row, or None if each row is one text. position_ids (B, T):
    a text begins at each one that does not follow the one before it. transformers calls this function in each pass. Its
    own version waits for a GPU, while `_read` computes the answer on the CPU."""
    known = _texts.get()
    if known is None:
        return find_packed_sequence_indices(position_ids)
    return None if known[0] is None else sent(known[0], position_ids.device)


def encoder_states(model: PreTrainedModel, source: Tensor) -> Tensor:
    """Return the encoder's states (B, S, D) for inputs `source` (B, S). Negative ids in `source` are padding, which is
    masked."""
    encoder: Any = model.get_encoder()
    ids, inside = _masked(model, source)
    return encoder(input_ids=ids, attention_mask=inside).last_hidden_state


def decoder_outputs(model: PreTrainedModel, ids: Tensor, source: Tensor | None, encoder: Tensor | None = None) -> Any:
    """Return the output of an encoder-decoder's decoder for texts ids (B, T); its last_hidden_state is (B, T, D).
    source (B, S): the encoder inputs, in which negative ids are padding. encoder (B, S, D): the encoder's states for
    these inputs, or None to compute them. Raises ValueError if `source` is None."""
    if source is None:
        raise ValueError(f"{type(model).__name__}: its encoder needs an input for each text, but `source` is None")
    width = int((source >= 0).sum(1).max())
    source = source[:, :width]
    states = encoder_states(model, source) if encoder is None else encoder[:, :width]
    decoder: Any = model.get_decoder()
    return decoder(
        input_ids=sent(ids, model.device),
        encoder_hidden_states=states,
        encoder_attention_mask=_masked(model, source)[1],
        use_cache=False,
    )


def _masked(model: PreTrainedModel, source: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors (B, S) for encoder inputs `source` (B, S), in which negative ids are padding: the inputs with
    the padding id in their place, and a mask that is 0 there and 1 elsewhere."""
    source = sent(source, model.device)
    return source.masked_fill(source < 0, id_of(model.config, "pad_token_id") or 0), (source >= 0).long()


def served(model: PreTrainedModel, vocabulary: int | None = None, layers: Sequence[int] = ()) -> tuple[Reader, Head]:
    """Return a target as two functions: ids (B, T) -> states (B, T, D) by layer, and last states (..., D) -> logits
    (..., V). The first also takes position_ids (B, T) and source (B, S). Both compute in the target's own precision,
    even if the draft trains in mixed precision.

    vocabulary: V, the number of ids that can have mass; None: all ids. layers: the layers to return besides LAST: 0 the
    embeddings, i the state after i decoder layers, ENCODER the encoder's states. Raises ValueError for a layer that
    does not exist, and if the head does more than project, cap or scale.
    """
    _, head = split(model, vocabulary)
    read_layers = by_layer(model, sorted({*layers} - {LAST}))

    def states(
        ids: Tensor, position_ids: Tensor | None = None, source: Tensor | None = None, length: Tensor | None = None
    ) -> Record:
        T, columns = ids.shape[1], columns_of(ids.shape[1], length)
        places = None if position_ids is None else position_ids[:, :columns]
        with torch.autocast(model.device.type, enabled=False):
            record = read_layers(ids[:, :columns], places, source)
        return {
            layer: part if layer == ENCODER else pad(part, (0, 0, 0, T - columns)) for layer, part in record.items()
        }

    return states, in_own_precision(model, head)


def in_own_precision(model: PreTrainedModel, head: Head) -> Head:
    """Return the model's head as a function that computes in the model's precision, even in mixed precision."""

    def logits(states: Tensor) -> Tensor:
        with torch.autocast(model.device.type, enabled=False):
            return head(states)

    return logits


def part_of_head(model: PreTrainedModel) -> Callable[[Tensor], Head] | None:
    """Return a function from token ids (n,) to the model's head for these tokens alone, in the target's own precision:
    last states (..., D) -> logits (..., n). Return None if the head is not a plain projection in memory."""
    head: Any = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear or head.weight.is_meta:
        return None
    return lambda ids: in_own_precision(model, head_of(model, ids))


def by_layer(model: PreTrainedModel, layers: Sequence[int]) -> Reader:
    """Return a function from ids (B, T) to states (B, T, D), keyed by layer: LAST and `layers`, in one pass. It also
    takes position_ids (B, T) and source (B, S). The model has no hooks afterwards, since hooks would make serving
    slower.

    layers: 0 the embeddings, i the state after i decoder layers, ENCODER the encoder's states. Raises ValueError for a
    layer that does not exist.
    """
    count, encodes = layers_of(model.config), model.config.is_encoder_decoder
    if wrong := [layer for layer in layers if not 0 <= layer < count and not (layer == ENCODER and encodes)]:
        raise ValueError(
            f"the target has no states of layers {wrong}: its layers are 0 (embeddings) to {count - 1}, and "
            f"{LAST} (last)"
        )

    inside = [layer for layer in layers if layer != ENCODER]

    def read(ids: Tensor, position_ids: Tensor | None = None, source: Tensor | None = None) -> Record:
        encoder = encoder_states(model, source) if encodes and source is not None else None
        with tapped(model, inside) as states:
            if encodes:
                last = decoder_outputs(model, ids, source, encoder).last_hidden_state
            else:
                last = _read(model, ids, position_ids)
        record = {LAST: last} | {layer: states[layer] for layer in inside}
        return record | ({} if encoder is None or ENCODER not in layers else {ENCODER: encoder})

    return read


@torch.no_grad()
def keeps_apart(model: PreTrainedModel, read: Read) -> bool:
    """Return whether attention stays within a text if several texts are packed into one row. read: the model's body,
    which takes ids and position_ids (B, T), from `split`.

    The test uses two texts. The states of the second text when packed must be much nearer to its states alone than to
    its states as a continuation of the first text. They need not be equal, since rounding makes any two passes differ.
    """
    training = model.training
    model.eval()
    each = torch.arange(8, device=model.device).unsqueeze(0)
    ids = each % model.config.get_text_config().vocab_size
    alone = read(ids[:, 4:]).float()
    packed, continued = (read(ids, positions)[:, 4:].float() for positions in (each % 4, None))
    model.train(training)
    return bool((packed - alone).norm() <= 0.2 * (continued - alone).norm())
