"""The pair that a command serves. It is a draft folder and a target, by default the one that the folder names."""

import copy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from omegaconf import OmegaConf
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from cotrain.config.groups import Bench, Data
from cotrain.config.settings import BenchConfig, GenerateConfig, PlanConfig, ServeCheckConfig
from cotrain.data.conversations import Template
from cotrain.data.corpora import shipped_domains, shipped_ids
from cotrain.data.prompt_rows import prompt_tokens
from cotrain.data.prompt_rows import said as said_of
from cotrain.data.sources import sources_of
from cotrain.data.splits import ALL_ROWS, PART, SPLITS, Prompts, apart
from cotrain.errors import UserError, user_errors
from cotrain.students.base import KINDS
from cotrain.training.preconditions import holds, outline, same_tokenizer, size_of, sketch
from inference.drafts.causal_lm import CausalLM
from inference.drafts.compatibility import hash_target
from inference.drafts.draft_folder import PROMPTS, Folder, Metadata, load_draft, load_tokenizer, read
from inference.drafts.weight_files import weight_files
from inference.proposers import kind_of
from inference.request import ends_of


class Known(NamedTuple):
    """A setting whose default is stored in draft folders. name: its key there, in the regime or in `made["served"]`.
    open: the value of the setting that selects the default. unsaid: the default if the folder stores none."""

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
    "data.chat": Known("chat", None, None),
    "data.template": Known("template", {}, {}),
    "chat": Known("messages", None, False),  # of generate
}


class Pair(NamedTuple):
    """A target and a draft as models without storage, and the target's tokenizer. draft: None if its folder has no
    weights."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    draft: PreTrainedModel | None


def resolved(cfg: BenchConfig | PlanConfig | ServeCheckConfig) -> str:
    """Return the target's path. It is `target.path` or, if that is null, the target that the draft folder names.

    target.path, target.adapter and the settings of `as_trained` are filled in. Raises UserError if the draft folder is
    invalid, or if no target is named."""
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


def as_trained(cfg: BenchConfig | PlanConfig | ServeCheckConfig | GenerateConfig, metadata: Metadata | None) -> None:
    """Replace the open settings of `KNOWN` by the values stored in the draft folder. If the user set other values,
    print a line that lists them.

    metadata: that of the folder. `Known.unsaid` replaces a value that the folder lacks, or stores as None.
    """
    said: dict[str, Any] = {**metadata.regime, **(metadata.origin.get("served") or {})} if metadata else {}
    if said.get("messages") and said.get("chat") is False:  # the default of older versions
        said["chat"] = None
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
            f"these settings differ from those of the draft folder, which are in brackets: {', '.join(typed)}",
            file=sys.stderr,
        )


def folder(path: str) -> Folder:
    """Read a draft folder without its weights. Raises UserError, naming draft.path, if it is invalid."""
    try:
        return read(path)
    except (ValueError, OSError) as error:
        raise UserError(f"draft.path: {error}") from error


def refuse_pair(draft_path: str, target_path: str, trust_remote_code: bool = False) -> Pair:
    """Return the pair without storage. A warning is printed if the draft is larger than the target.

    Raises UserError, before weights are loaded, in three cases: the target is missing, the draft has other token ids,
    or the draft does not fit the target (`Proposer.fits`).
    """
    with user_errors():
        target, tokenizer = outline(target_path, trust_remote_code)
        draft_folder = folder(draft_path)
        kind = kind_of(draft_folder.kind)
        own, draft = load_tokenizer(draft_folder.path), _sketch(draft_folder.path, kind.network_class)
        if draft is not None:
            kind.fits(draft, target, f"draft.path={draft_path}")
    if own is not None and not kind.own_tokenizer:
        same_tokenizer(draft_path, tokenizer, own)
    if draft is not None and size_of(draft).active > size_of(target).active:
        print(f"warning: draft.path={draft_path} is the larger model: it cannot make {target_path} faster",
              file=sys.stderr)  # fmt: skip
    return Pair(target, tokenizer, draft)


def _sketch(path: Path, network: Any) -> PreTrainedModel | None:
    """Return a folder's network without storage, or None if its kind has no network. Raises OSError or ValueError if
    the files are missing or invalid."""
    if network is None:
        return None
    if network is CausalLM and not CausalLM.has_parts(config := AutoConfig.from_pretrained(path)):
        return sketch(str(path), config, key="draft.path")
    weight_files(path)
    with torch.device("meta"):
        return network(network.config_class.from_pretrained(path))


def measured(path: str) -> Folder:
    """Read a draft folder of a kind that can be measured. Raises UserError, naming draft.path, for other kinds."""
    draft_folder = folder(path)
    if draft_folder.kind not in KINDS:
        raise UserError(
            f"draft.path: {path} is of kind {draft_folder.kind!r}; the kinds that can be measured are "
            f"{', '.join(KINDS)}"
        )
    return draft_folder


def load_network(draft_folder: Folder, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Load the network of a draft folder on the target's device. Raises the errors of `load_draft`."""
    network_class = kind_of(draft_folder.kind).network_class
    draft = load_draft(draft_folder.path, network=network_class, target=hash_target(target.config, tokenizer))[0]
    torch.nn.Module.to(draft, target.device)
    return draft


def room_of(pair: Pair) -> int:
    """Return the length of the longest text that both models can read."""
    return min(holds(model.config) for model in (pair.target, pair.draft) if model is not None)


def prompts(
    data: Data,
    size: Bench,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    room: int | None = None,
    draft: Path | None = None,
    key: str = "bench.prompt_tokens",
) -> Prompts:
    """Return the prompts to measure on. These are the prompts of data.path that are not in the training split. Without
    data.path they are those that the folder `draft` has, and without these the shipped ones.

    Prompts of a folder were not learnt from and ranked no checkpoint; the `PART`-th part of them ranks draft lengths.
    room: the largest allowed number of tokens of a prompt, if the user did not set `key`. size.prompt_tokens is then
    raised for texts that have a domain without a prompt of that length. The value in the folder is for other texts."""
    encoder = target.config.is_encoder_decoder
    own = draft / PROMPTS if draft and data.path is None and (draft / PROMPTS).is_file() else None
    if own is None and data.path is None:
        shipped = apart(*shipped_ids(tokenizer, size.prompt_tokens, encoder), [], "shipped")
        return replace(shipped, domains=shipped_domains(tokenizer, size.prompt_tokens, encoder))
    if own is not None:
        data = copy.copy(data)
        data.path = str(own)
    splits, template = SPLITS[1:] if own is None else (ALL_ROWS,), Template(tokenizer, data.template, ends_of(target))
    sources = sources_of(data, splits, template, encoder)
    if room is not None and not all(rows.covered(size.prompt_tokens) for rows in sources.values()):
        first, *others = sources.values()
        size.prompt_tokens = max(size.prompt_tokens, prompt_tokens(first, room, others))
    named = sources if own is None else {SPLITS[-1]: sources[ALL_ROWS]}
    for line in said_of(named, size.prompt_tokens, key):
        print(line, file=sys.stderr)
    several = [rows.several(size.prompt_tokens, size.seed) for rows in sources.values()]
    if own is not None:
        (unseen,) = several
        print(f"prompts: {len(unseen)} of {own}, which the draft did not learn from; data.path= names others")
        part = max(len(unseen) // PART, 1)
        several = [unseen[:part], unseen[part:]]
    ranking, final = several
    domains = {ids: name for rows in sources.values() for ids, name in rows.domains(size.prompt_tokens).items()}
    return replace(apart(ranking, final, [], "own"), domains=domains)
