"""The pair that a command serves: a draft folder, and the target that it names unless another one is given."""

import sys
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from omegaconf import OmegaConf
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from cotrain.config.settings import BenchConfig, GenerateConfig, ServeCheckConfig
from cotrain.errors import UserError
from cotrain.students.base import KINDS
from cotrain.training.preconditions import outline, same_tokenizer, size_of, sketch
from inference.drafts.causal_lm import CausalLM
from inference.drafts.compatibility import hash_target
from inference.drafts.draft_folder import Folder, Metadata, load_draft, load_tokenizer, read
from inference.drafts.weight_files import weight_files
from inference.proposers import kind_of


class Known(NamedTuple):
    """A setting that a draft folder knows. name: in its regime or its `made["served"]`; open: the value that leaves
    the choice to the folder; unsaid: what it is then where the folder does not say it."""

    name: str
    open: Any
    unsaid: Any


KNOWN = {
    "regime.temperature": Known("temperature", None, 1.0),
    "regime.top_k": Known("top_k", None, 0),
    "regime.top_p": Known("top_p", None, 1.0),
    "verify": Known("verify", None, "token"),
    "bench.prompt_tokens": Known("prompt_tokens", 0, 48),
    "prompt_tokens": Known("prompt_tokens", 0, 48),
    "quantisation.kind": Known("quantisation", "as_trained", "none"),
    "data.chat": Known("chat", None, False),
    "data.template": Known("template", {}, {}),
}


class Pair(NamedTuple):
    """What is known before weights are loaded: target and draft without storage, the target's tokenizer. draft: None of
    a kind whose folder has no weights."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    draft: PreTrainedModel | None


def resolved(cfg: BenchConfig | ServeCheckConfig) -> str:
    """The target: `target.path`, or where it is null the one that the draft folder names, with its adapter; both are
    filled in, and what `as_trained` knows. Raises UserError for a folder that is none, and one that names no target."""
    if cfg.draft.path is None:
        raise UserError("name the draft folder with draft.path=")
    metadata = folder(cfg.draft.path).metadata
    if cfg.target.path is None:
        if metadata is None:
            raise UserError(f"draft.path={cfg.draft.path} does not name its target: give target.path=")
        cfg.target.path = metadata.target["name"]
        cfg.target.adapter = cfg.target.adapter or metadata.origin.get("adapter")
    as_trained(cfg, metadata)
    return str(cfg.target.path)


def as_trained(cfg: BenchConfig | ServeCheckConfig | GenerateConfig, metadata: Metadata | None) -> None:
    """Fill in what is left open with what a draft folder was made for, and print where others were typed.

    metadata: what the folder says of itself; None, or a folder from before it said all of this: `Known.unsaid`.
    """
    said: dict[str, Any] = {**metadata.regime, **(metadata.origin.get("served") or {})} if metadata else {}
    typed = []
    for key, known in KNOWN.items():
        group, _, name = key.rpartition(".")
        config: Any = OmegaConf.select(cast(Any, cfg), group) if group else cfg
        if config is None or name not in config:
            continue
        if config[name] == known.open:
            config[name] = said.get(known.name, known.unsaid)
        elif known.name in said and config[name] != said[known.name]:
            typed.append(f"{key}={config[name]} ({said[known.name]})")
    if typed:
        print(
            f"other settings than the draft was made for, with its own in brackets: {', '.join(typed)}",
            file=sys.stderr,
        )


def folder(path: str) -> Folder:
    """A draft folder, its weights unread. Raises UserError naming draft.path for any other."""
    try:
        return read(path)
    except (ValueError, OSError) as error:
        raise UserError(f"draft.path: {error}") from error


def refuse_pair(draft_path: str, target_path: str, trust_remote_code: bool = False) -> Pair:
    """Both without storage. A draft that is larger than its target is measured, and said to be.

    Raises UserError, before weights are loaded, for a target that is not there, a draft of other token ids, and what
    the draft's kind refuses (`Proposer.fits`).
    """
    try:
        target, tokenizer = outline(target_path, trust_remote_code)
        draft_folder = folder(draft_path)
        kind = kind_of(draft_folder.kind)
        own, draft = load_tokenizer(draft_folder.path), _sketch(draft_folder.path, kind.network_class)
        if draft is not None:
            kind.fits(draft, target, f"draft.path={draft_path}")
    except (ValueError, OSError) as error:
        raise UserError(" ".join(str(error).split())) from error
    if own is not None and not kind.own_tokenizer:
        same_tokenizer(draft_path, tokenizer, own)
    if draft is not None and size_of(draft).active > size_of(target).active:
        print(f"warning: draft.path={draft_path} is the larger model: it cannot make {target_path} faster",
              file=sys.stderr)  # fmt: skip
    return Pair(target, tokenizer, draft)


def _sketch(path: Path, network: Any) -> PreTrainedModel | None:
    """A folder's network without storage, None without one. Raises where the folder lacks it."""
    if network is None:
        return None
    if network is CausalLM and not CausalLM.has_parts(config := AutoConfig.from_pretrained(path)):
        return sketch(str(path), config, key="draft.path")
    weight_files(path)
    with torch.device("meta"):
        return network(network.config_class.from_pretrained(path))


def measured(path: str) -> Folder:
    """A draft folder of a kind that is measured: one with a student. Raises UserError naming draft.path for others."""
    draft_folder = folder(path)
    if draft_folder.kind not in KINDS:
        raise UserError(f"draft.path: {path} is of kind {draft_folder.kind!r}; what is measured is {', '.join(KINDS)}")
    return draft_folder


def load_network(draft_folder: Folder, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """What a draft folder holds, on the target's device. Raises as `load_draft`."""
    network_class = kind_of(draft_folder.kind).network_class
    draft = load_draft(draft_folder.path, network=network_class, target=hash_target(target.config, tokenizer))[0]
    torch.nn.Module.to(draft, target.device)
    return draft
