"""The pair that a command serves: a draft folder and a target. The default target is the one that the folder names."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from cotrain import paths
from cotrain.config.groups import Bench, Data
from cotrain.config.settings import DraftFolderConfig, GenerateConfig, sampling
from cotrain.data.conversations import Template
from cotrain.data.corpora import shipped_domains, shipped_ids
from cotrain.data.prompt_rows import Source, prompt_tokens, said_of_rows
from cotrain.data.sources import sources_apart, sources_of
from cotrain.data.splits import ALL_ROWS, PART, SPLITS, Prompts, apart, shared
from cotrain.errors import UserError, user_errors, warn
from cotrain.planning.plan import Plan
from cotrain.students.base import KINDS
from cotrain.students.independent import published_network
from cotrain.training.preconditions import outline, refuse_datastore, same_tokenizer, say_other_weights, size_of, sketch
from inference.drafts.causal_lm import CausalLM
from inference.drafts.compatibility import hash_target
from inference.drafts.draft_folder import PROMPTS, REPORT, Folder, Metadata, ServedAs, load_draft, load_tokenizer, read
from inference.drafts.gguf_target import PACKAGED
from inference.drafts.weight_files import building, read_json, weight_files
from inference.models.pretrained import longest_text
from inference.proposers import kind_of
from inference.request import ends_of

# Settings whose default is stored in draft folders: the name of that value, see `stored`, and the value of the setting
# that selects it.
KNOWN: dict[str, tuple[str, Any]] = {
    "regime.temperature": ("temperature", None),
    "regime.top_k": ("top_k", None),
    "regime.top_p": ("top_p", None),
    "verify": ("verify", None),
    "bench.prompt_tokens": ("prompt_tokens", 0),
    "prompt_tokens": ("prompt_tokens", 0),
    "quantisation.kind": ("quantisation", "as_trained"),
    "target.dtype": ("dtype", "auto"),
    "bench.draft_dtype": ("draft_dtype", "as_trained"),
    "bench.draft_int8": ("int8", None),
    "data.chat": ("chat", None),
    "data.template": ("template", {}),
    "chat": ("messages", None),  # of generate
}
UNSAID = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **asdict(ServedAs()), "draft_dtype": "bfloat16", "int8": None}


class Pair(NamedTuple):
    """A target and a draft as models without storage (no weights), and the target's tokenizer. draft: None if its
    folder has no weights."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    draft: PreTrainedModel | None


def resolved(cfg: DraftFolderConfig) -> str:
    """Return the target's path: target.path, or else the target that the draft folder names.

    Sets target.path, target.adapter and all settings that mean "as the folder stores" in `cfg`, in place. Raises
    UserError if the draft folder is invalid, or if no target is named.
    """
    if cfg.draft.path is None:
        raise UserError(
            "draft.path=null: set draft.path= to a draft folder, for example draft.path=outputs/train/draft"
        )
    metadata = read_folder(cfg.draft.path).metadata
    if cfg.target.path is None:
        if metadata is None:
            raise UserError(f"draft.path={cfg.draft.path} does not name its target: set target.path= to this model")
        cfg.target.path = metadata.target["name"]
        cfg.target.adapter = cfg.target.adapter or metadata.origin.get("adapter")
    as_trained(cfg, metadata)
    say_other_weights(cfg.draft.path, metadata, str(cfg.target.path), cfg.target.adapter)
    return str(cfg.target.path)


def as_trained(cfg: DraftFolderConfig | GenerateConfig, metadata: Metadata | None) -> None:
    """Set those settings of `KNOWN` that the user left unset to the values stored in the draft folder, in place. If the
    user set other values, print a line to stderr that lists them.

    metadata: the folder's metadata, or None without cotrain.json. A value that is not stored is taken from `UNSAID`.
    """
    said, typed = stored(metadata) if metadata else {}, []
    for key, (stored_as, left_open) in KNOWN.items():
        group, _, name = key.rpartition(".")
        settings: Any = getattr(cfg, group, None) if group else cfg
        if settings is None or name not in type(settings).model_fields:
            continue
        value = getattr(settings, name)
        if value == left_open:
            setattr(settings, name, said.get(stored_as, UNSAID[stored_as]))
        elif stored_as in said and value != said[stored_as]:
            typed.append(f"{key}={value} ({said[stored_as]})")
    k = cfg.policy.k if isinstance(cfg, GenerateConfig) else None
    if metadata and k is not None and (metadata.tree or k != metadata.k):
        typed.append(f"policy.k={k} ({shape(metadata)})")
    if typed:
        warn(f"these settings differ from those of the draft folder, which are in brackets: {', '.join(typed)}")


def shape(metadata: Metadata) -> str:
    """Return a phrase for the shape in the folder's plan: a tree with its number of nodes, or a draft length."""
    return f"a tree of {len(metadata.tree.parents)} nodes" if metadata.tree else f"draft length {metadata.k}"


def stored(metadata: Metadata) -> dict[str, Any]:
    """Return the values that a draft folder stores, keyed by the names that `KNOWN` gives them. draft_dtype is "auto",
    because the stored weights already have the dtype in which they were served."""
    return {**metadata.regime, **asdict(metadata.served), "int8": metadata.int8, "draft_dtype": "auto"}


def read_folder(path: str) -> Folder:
    """Read a draft folder without its weights. Raises UserError, which names draft.path, if the folder is invalid."""
    try:
        return read(path)
    except (ValueError, OSError) as error:
        raise UserError(f"draft.path: {error}") from error


def refuse_pair(draft_path: str, target_path: str, trust_remote_code: bool = False) -> Pair:
    """Return the pair of a draft folder and a target, without storage (no weights). Print a warning if the draft is
    larger than the target.

    target_path: a hub id or folder. Raises UserError, before weights are loaded, in three cases: the target is missing,
    the draft has other token ids, or the draft was made for a target of other sizes.
    """
    draft_folder = read_folder(draft_path)
    try:
        target, tokenizer = outline(target_path, trust_remote_code)
    except (ValueError, OSError) as error:
        elsewhere = target_path not in PACKAGED and not Path(target_path).exists()
        named = elsewhere and draft_folder.metadata and draft_folder.metadata.target["name"] == target_path
        hint = f"; draft.path={draft_path} names this target: if it moved, give target.path=" if named else ""
        raise UserError(" ".join(str(error).split()) + hint) from error
    with user_errors():
        kind = kind_of(draft_folder.kind)
        own, draft = load_tokenizer(draft_folder.path), _sketch(draft_folder, kind.network_class, target)
        if draft is not None:
            kind.fits(draft, target, f"draft.path={draft_path}")
            refuse_datastore(f"draft.path={draft_path}", draft, tokenizer)
    if own is not None:
        same_tokenizer(draft_path, tokenizer, own)
    if draft is not None and size_of(draft).active > size_of(target).active:
        warn(f"warning: draft.path={draft_path} is the larger model: it cannot make {target_path} faster")
    return Pair(target, tokenizer, draft)


def _sketch(draft_folder: Folder, network: Any, target: PreTrainedModel) -> PreTrainedModel | None:
    """Return the network of a draft folder without storage, or None if this kind of draft has no network. For a folder
    in a published layout, print a line that says what it is.

    network: the class of the network, or None. target: without storage. Raises OSError or ValueError if files are
    missing or invalid."""
    path = draft_folder.path
    if network is None:
        return None
    if draft_folder.layout:
        return published_network(draft_folder.layout, target)
    if network is CausalLM:
        with building(path):
            config = AutoConfig.from_pretrained(path)
        if not CausalLM.has_parts(config):
            return sketch(str(path), config, key="draft.path")
    weight_files(path)
    with building(path, network), torch.device("meta"):
        return network(network.config_class.from_pretrained(path))


def measurable_folder(path: str) -> Folder:
    """Read a draft folder without its weights. Raises UserError, which names draft.path, if drafts of its kind cannot
    be measured."""
    draft_folder = read_folder(path)
    if draft_folder.kind not in KINDS:
        raise UserError(
            f"draft.path={path} is a draft of kind {draft_folder.kind!r}, which cannot be measured: name one of kind "
            f"{', '.join(KINDS)}"
        )
    return draft_folder


def load_network(draft_folder: Folder, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Return the network of a draft folder, loaded on the target's device. tokenizer: the target's. Raises ValueError
    or OSError, which names the file, for missing or wrong weights, and for a folder that was made for another target.
    """
    draft = load_draft(
        draft_folder.path,
        network=kind_of(draft_folder.kind).network_class,
        target=hash_target(target.config, tokenizer),
        model=target,
    )[0]
    torch.nn.Module.to(draft, target.device)
    return draft


def plan_of(
    cfg: DraftFolderConfig,
    draft_folder: Folder,
    models: tuple[PreTrainedModel, PreTrainedTokenizerBase],
    bench: Bench,
    verify: str | None,
    **others: Any,
) -> Plan:
    """Load the draft of a folder, and return the plan for its measurement.

    cfg: settings that `resolved` has completed. models: the target and its tokenizer. bench: the sizes of the
    measurement. verify: the verification rule, which must be set. others: further fields of the plan.
    """
    assert verify is not None
    drafting = {"objective": draft_folder.metadata.objective} if draft_folder.metadata else {}
    return Plan(
        *models,
        load_network(draft_folder, *models),
        sampling(cfg.regime),
        verify,
        bench,
        (str(cfg.target.path), str(cfg.draft.path)),
        kind=draft_folder.kind,
        **drafting | others,
    )


def room_of(pair: Pair) -> int:
    """Return the length in tokens of the longest text that both models can read."""
    return min(longest_text(model.config) for model in (pair.target, pair.draft) if model is not None)


def prompts(
    data: Data,
    size: Bench,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    room: int | None = None,
    draft: Path | None = None,
    key: str = "bench.prompt_tokens",
) -> Prompts:
    """Return the prompts to measure on.

    With data.path, these are its prompts that are not in the training split and do not begin like a training prompt.
    Without data.path, they are the prompts stored in the draft folder. The draft did not learn from these, and no
    checkpoint was ranked by them; one in `PART` of them is used to rank draft lengths. Nor did a shipped draft learn
    from a data.path that has none of its prompts: all rows of that are used. If the folder stores none, the shipped
    prompts are used.

    Args:
        size: has the prompt length (size.prompt_tokens) and the seed. The prompt length is changed in place if `room`
            is given and a domain has no prompt of that length.
        target: may be without storage.
        room: the most tokens that a prompt may have; None if the user set the prompt length.
        draft: the draft folder, or None.
        key: the name of the setting for the prompt length, for messages.
    """
    encoder = target.config.is_encoder_decoder
    stored = draft / PROMPTS if draft and (draft / PROMPTS).is_file() else None
    own = stored if data.path is None else None
    if own is None and data.path is None:
        file = draft / REPORT if draft else None
        if file and file.is_file() and (read_json(file).get("extra") or {}).get("prompts") == "own":
            warn(
                f"prompts: the shipped ones are used, but {file} was measured on prompts of the user: to use their "
                "held-out prompts, set data.path= to the texts that the draft learnt from"
            )
        shipped = apart(*shipped_ids(tokenizer, size.prompt_tokens, encoder), [], "shipped")
        return replace(shipped, domains=shipped_domains(tokenizer, size.prompt_tokens, encoder))
    template = Template(tokenizer, data.template, ends_of(target))

    def every(data: Data) -> list[list[int]]:
        rows = sources_of(data, (ALL_ROWS,), template, encoder)[ALL_ROWS]
        return [prompt for prompt in rows.each(longest_text(target.config)) if prompt]

    whole = own is not None
    if own is not None:
        data = data.model_copy(update={"path": str(own)})
    elif stored and stored.parent.parent == paths.folder("data") / paths.DRAFTS:
        whole = not shared(every(data), every(Data(path=str(stored), template=data.template)))

    def limit(sources: Mapping[str, Source]) -> int:
        first, *others = (rows for split, rows in sources.items() if split != SPLITS[0])
        if room is not None and not all(rows.covered(size.prompt_tokens) for rows in (first, *others)):
            size.prompt_tokens = max(size.prompt_tokens, prompt_tokens(first, room, others))
        return size.prompt_tokens

    sources = sources_apart(data, (ALL_ROWS,) if whole else SPLITS, template, encoder, limit)
    train = sources.pop(SPLITS[0], None)
    named = {SPLITS[-1]: sources[ALL_ROWS]} if whole else sources
    for line in said_of_rows(named, size.prompt_tokens, key):
        warn(line)
    several = [rows.several(size.prompt_tokens, size.seed) for rows in sources.values()]
    if whole:
        (unseen,) = several
        others = "; data.path= names others" * bool(own)
        print(f"prompts: {len(unseen)} of {data.path}, which the draft did not learn from{others}")
        part = max(len(unseen) // PART, 1)
        several = [unseen[:part], unseen[part:]]
    ranking, final = several
    domains = {ids: name for rows in sources.values() for ids, name in rows.domains(size.prompt_tokens).items()}
    learnt = [prompt for prompt in train.each(size.prompt_tokens) if prompt] if train else []
    return replace(apart(ranking, final, learnt, "own"), domains=domains)
