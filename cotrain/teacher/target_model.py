"""The frozen target as a teacher: loaded in the precision that is served, read as hidden states and a head."""

import re
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from cotrain.evaluation.held_out import Head, Read
from cotrain.training.ranks import local_rank
from inference.drafts.bundled_target import resolve
from inference.drafts.draft_folder import load_tokenizer
from inference.drafts.weight_files import CONFIG, read_json, weight_files
from inference.models.dtypes import quantised, widened

QUANTISATIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "int8": {"load_in_8bit": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16},
}


PACKS = "support_avx512bf16_for_cpu"  # of bitsandbytes' 4-bit layers
REPOSITORY = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")  # what the hub calls a model


def load_target(
    path: str, quantisation: str = "none", dtype: str = "auto", trust_remote_code: bool = False
) -> PreTrainedModel:
    """A frozen causal LM from a folder or hub id, safetensors only, on the GPU when there is one. dtype: "auto" for the
    checkpoint's own, or float32, see `widened`.

    A checkpoint that says how it is quantised is loaded so.

    Raises ValueError for an unknown quantisation, one of a checkpoint that has its own, and for weights that are
    missing or not finite.
    """
    refuse_quantisation(path, quantisation, AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code))
    options = QUANTISATIONS[quantisation]
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=dtype,
        use_safetensors=True,
        trust_remote_code=trust_remote_code,
        **({"quantization_config": BitsAndBytesConfig(**options)} if options else {}),  # None would undo its own
        device_map=f"cuda:{local_rank()}" if torch.cuda.is_available() else "cpu",
        output_loading_info=True,
    )
    model, info = loaded
    if info["missing_keys"]:
        raise ValueError(f"target.path: {path} lacks weights: {', '.join(sorted(info['missing_keys']))}")
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and not bool(torch.isfinite(weight).all()):
            raise ValueError(f"target.path: {path} has NaN or infinite weights in {name}")
    _unpacked(model)
    own = model.dtype
    if dtype == "auto" and widened(model).dtype != own:
        dtype = str(own).removeprefix("torch.")
        print(f"this CPU would emulate {dtype}, so the target runs in float32", file=sys.stderr)
    return model.eval().requires_grad_(False)


def refuse_quantisation(path: str, quantisation: str, config: PretrainedConfig) -> None:
    """Raise ValueError for a quantisation that is unknown, cannot be made here, or is not the checkpoint's own."""
    if quantisation not in QUANTISATIONS:
        raise ValueError(f"quantisation: {quantisation!r} is none of {', '.join(QUANTISATIONS)}")
    if quantisation == "none":
        return
    if quantised(config):
        raise ValueError(f"quantisation: {path} is quantised as it is; quantisation=none")
    if find_spec("bitsandbytes") is None:
        raise ValueError(f"quantisation={quantisation} needs bitsandbytes: pip install bitsandbytes, or =none")


def _unpacked(model: PreTrainedModel) -> None:
    """bitsandbytes packs 4-bit weights for a CPU's passes; once its state was read, as a fingerprint does, it packs
    them wrongly, and passes have another law (seen with 0.50). Left as they are, they are read right."""
    for module in model.modules():
        if hasattr(module, PACKS):
            setattr(module, PACKS, False)


def adapted(model: PreTrainedModel, adapter: str) -> PreTrainedModel:
    """The target with a PEFT adapter as it is served: merged into its weights, beside them where these are quantised.

    Raises ValueError without peft, and for a folder that is no adapter of this target.
    """
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ValueError("target.adapter: it needs peft: pip install 'cotrain[adapter]'") from error
    try:
        if quantised(model.config):
            model.load_adapter(adapter)
            return model.eval().requires_grad_(False)
        merged: Any = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    except (ValueError, RuntimeError, OSError) as error:
        raise ValueError(f"target.adapter: {adapter} is no adapter of this target: {error}") from error
    return cast(PreTrainedModel, merged.eval().requires_grad_(False))


def load_config(
    path: str, trust_remote_code: bool = False, key: str = "target.path"
) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """Configuration and tokenizer of a model, without its weights; "bundled" is the target that is shipped.

    Raises ValueError or OSError, naming the key or file, for a model that is not there or lacks a tokenizer.
    """
    place = resolve(path)
    if Path(place).is_dir():
        try:
            if (Path(place) / CONFIG).is_file():
                read_json(Path(place) / CONFIG)
            tokenizer = load_tokenizer(Path(place), trust_remote_code)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
        if not (Path(place) / CONFIG).is_file():
            raise ValueError(f"{key}: {path} holds no model: it has no {CONFIG}")
    else:
        tokenizer = _hub_tokenizer(place, trust_remote_code, key)
    if tokenizer is None:
        raise ValueError(f"{key}: {path} has no tokenizer files (tokenizer.json, tokenizer_config.json)")
    return AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code), tokenizer


def load_pair(
    path: str, quantisation: str = "none", dtype: str = "auto", trust_remote_code: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Target and tokenizer; "bundled" is the one shipped. Raises as load_config, and for damaged weights."""
    place = resolve(path)
    if Path(place).is_dir():
        weight_files(Path(place))
    _, tokenizer = load_config(path, trust_remote_code)
    return load_target(place, quantisation, dtype, trust_remote_code), tokenizer


def _hub_tokenizer(name: str, trust_remote_code: bool, key: str) -> PreTrainedTokenizerBase:
    if not REPOSITORY.fullmatch(name):
        raise ValueError(f"{key}: {name} is no folder")
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{key}: {name} is no folder, and no model that the hub gave: {reason}") from error


class Remembering:
    """Hidden states of the target, kept by text: a text that is seen again is not read again.

    read: ids (B, T) -> hidden states (B, T, D). limit: bytes kept, in the target's dtype on the host; what comes after
    is read live.
    """

    def __init__(self, read: Read, limit: int) -> None:
        self.read, self.room = read, limit
        self.kept: dict[tuple[int, int], Tensor] = {}  # by text and the width that it was padded to
        self.widths: set[int] = set()

    def fill(
        self,
        ids: Tensor,
        keys: Tensor,
        batch: int = 16,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Read all texts (N, T) with their keys (N,) at once, as far as there is room: cheaper than few at a time."""
        for start in range(0, len(ids), batch):
            if progress:
                progress(start, len(ids))
            part = slice(start, start + batch)
            names, known = self._names(ids[part], keys[part]), len(self.kept)
            if all(name in self.kept for name in names):
                continue
            self._looked_up(ids[part], names)
            if len(self.kept) == known:
                break  # full
        if progress:
            progress(len(ids), len(ids))

    def __call__(self, ids: Tensor, keys: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """ids (B, T), keys (B,) one a text, the same ids whenever it comes -> (B, T, D)."""
        return self._looked_up(ids, self._names(ids, keys), position_ids)

    def _names(self, ids: Tensor, keys: Tensor) -> list[tuple[int, int]]:
        """States of a text that was padded to another width are given up: they will not be asked for again."""
        width = ids.shape[1]
        for key in keys.tolist():
            for name in [(key, other) for other in self.widths - {width} if (key, other) in self.kept]:
                self.room += self.kept.pop(name).nbytes
        self.widths.add(width)
        return [(key, width) for key in keys.tolist()]

    @torch.no_grad()
    def _looked_up(self, ids: Tensor, names: list[tuple[int, int]], position_ids: Tensor | None = None) -> Tensor:
        if any(name not in self.kept for name in names):
            states = self.read(ids, position_ids)
            self._keep(names, states)
            return states
        return torch.stack([self.kept[name] for name in names]).to(ids.device, non_blocking=True)

    def _keep(self, names: list[tuple[int, int]], states: Tensor) -> None:
        for name, one in zip(names, states, strict=True):
            if name not in self.kept and one.nbytes <= self.room:
                self.kept[name] = one.to("cpu", copy=True)
                self.room -= one.nbytes


def split(model: PreTrainedModel, vocabulary: int | None = None) -> tuple[Read, Head]:
    """(ids (B, T) -> hidden states (B, T, D), hidden states (..., D) -> logits (..., V)) of a causal LM. With
    position_ids (B, T), attention begins anew wherever they do not go on by one: see `keeps_apart`. vocabulary: ids
    that have mass, V; the rows behind them only pad the head (None: all have some).

    Heads that cap or scale their logits are followed; any other way is refused with a ValueError, since the two
    halves are compared with the whole on a few ids first.
    """
    hidden, logits = halves(model, vocabulary)
    _agree(model, hidden, logits)
    return hidden, logits


def halves(model: PreTrainedModel, vocabulary: int | None = None) -> tuple[Read, Head]:
    """`split` of a model that was tried before."""
    head: Any
    head, config = model.get_output_embeddings(), model.config.get_text_config().to_dict()
    cap, scale = config.get("final_logit_softcapping"), config.get("logit_scale") or 1.0

    def hidden(ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        places = {} if position_ids is None else {"position_ids": position_ids.to(model.device)}
        return model.base_model(input_ids=ids.to(model.device), use_cache=False, **places).last_hidden_state

    def logits(states: Tensor) -> Tensor:
        out: Tensor = head(
            states.to(head.weight.dtype) if not torch.is_autocast_enabled(states.device.type) else states
        )
        out = out if scale == 1.0 else out * scale
        out = torch.tanh(out / cap) * cap if cap else out
        return out[..., :vocabulary]

    return hidden, logits


def served(model: PreTrainedModel, vocabulary: int | None = None) -> tuple[Read, Head]:
    """`split` of a target, computed in its own numbers as it is when served, whatever the draft's step is computed in.
    A float32 target teaches in float32 beside a draft in mixed precision."""
    read, head = split(model, vocabulary)
    own = partial(torch.autocast, model.device.type, enabled=False)

    def hidden(ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        with own():
            return read(ids, position_ids)

    def logits(states: Tensor) -> Tensor:
        with own():
            return head(states)

    return hidden, logits


@torch.no_grad()
def keeps_apart(model: PreTrainedModel, read: Read) -> bool:
    """Whether texts that are packed into one row are read as if alone: tried on two, of which the second must be much
    nearer to itself alone than to itself behind the first (rounding makes any two ways differ)."""
    training = model.training
    model.eval()
    each = torch.arange(8, device=model.device).unsqueeze(0)
    ids = each % model.config.get_text_config().vocab_size
    alone = read(ids[:, 4:]).float()
    packed, behind = (read(ids, places)[:, 4:].float() for places in (each % 4, None))
    model.train(training)
    return bool((packed - alone).norm() <= 0.2 * (behind - alone).norm())


@torch.no_grad()
def _agree(model: PreTrainedModel, hidden: Read, logits: Head) -> None:
    training = model.training
    model.eval()  # dropout would make any two passes differ
    ids = torch.arange(min(8, model.config.get_text_config().vocab_size), device=model.device).unsqueeze(0)
    halves, whole = logits(hidden(ids)).float(), model(input_ids=ids, use_cache=False).logits.float()
    whole = whole[..., : halves.shape[-1]]
    model.train(training)
    if not torch.allclose(halves, whole, rtol=1e-2, atol=1e-2):
        raise ValueError(f"{type(model).__name__}: its head does more than project; it cannot be read in chunks")
