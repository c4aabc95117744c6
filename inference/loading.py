"""Loading of engines. `load` makes an engine from a draft folder."""

import warnings
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from inference.adaptive_policy import Adaptive
from inference.drafts.bundled_target import draft_of, resolve
from inference.drafts.compatibility import hash_target
from inference.drafts.draft_folder import (
    METADATA,
    Metadata,
    ServedAs,
    folder_identity,
    load_tokenizer,
    other_weights,
    read,
)
from inference.engine import Engine
from inference.models.quantisation import load_as
from inference.policy import Fixed
from inference.proposers import kind_of
from inference.proposers.base import LoadArguments
from inference.verify.rules import rule_of


def load(
    folder: str | Path, target: PreTrainedModel | str | Path | None = None, *, kind: str | None = None, **settings: Any
) -> Engine:
    """Return the engine that the report of a draft folder describes: the target in the measured dtype and quantisation,
    the draft, the rule, the draft length or tree, and the arguments of the chat template. Sampling settings are not
    among them: give them to each call. `Metadata.regime` records the sampling settings that were measured.

    A draft that was planned with a tree drafts chains if `settings` contain a `policy`, or a rule that does not verify
    trees.

    folder: path of the draft folder, or the name of a draft that comes along ("smollm2"). target: a model, used as it
    is, or a path; None for the target that the folder names. If it is a model, give `tokenizer=` too, or prompts as
    ids. kind: the kind of draft; None for the kind that the folder names. settings: further arguments of `Engine`. They
    replace what the folder says.

    Raises ValueError for an unknown kind, for a folder that names no target or a target with an adapter, for a tree if
    the kind drafts only chains, for an adaptive policy of another draft, and for a draft that is damaged or does not
    fit the target. Raises OSError if the target or the draft cannot be read.
    """
    if not isinstance(folder, str | PathLike):
        raise ValueError(f"folder must be the path of a draft folder, not {folder!r}")
    draft = read(draft_of(folder))
    metadata = draft.metadata
    served = metadata.served if metadata else ServedAs()
    _refuse_policy(draft.path, settings.get("policy"))
    tokenizer = settings.pop("tokenizer", None)
    if target is None or isinstance(target, str | PathLike):
        if target is None:
            target = _named_target(folder, metadata)
        if changed := other_weights(metadata, str(target)):
            warnings.warn(f"{draft.path / METADATA}: {changed}", stacklevel=2)
        path = resolve(str(target))
        tokenizer = tokenizer or load_tokenizer(Path(path))
        dtype = settings.pop("dtype", None) or (None if served.dtype == "auto" else served.dtype)
        try:
            target = load_as(path, served.quantisation, dtype, settings.pop("device", None))
        except OSError as error:
            reason = str(error).splitlines()[0]
            raise OSError(
                f"{draft.path}: its target {path} cannot be loaded ({reason}); give target= the target or its path"
            ) from error
    metadata = _with_defaults(metadata, served, settings)
    beside = LoadArguments(target, hash_target(target.config, tokenizer), metadata)
    proposer_class = kind_of(kind or draft.kind)
    if metadata and metadata.tree and not proposer_class.drafts_trees:
        raise ValueError(
            f"{draft.path / METADATA}: tree must be null: a draft of kind {draft.kind!r} drafts chains, no trees"
        )
    proposer = proposer_class.load(draft.path, beside)
    return Engine(target, proposer, tokenizer=tokenizer or load_tokenizer(draft.path), **settings)


def _named_target(folder: str | Path, metadata: Metadata | None) -> str:
    if metadata is None:
        raise ValueError(f"{folder} has no cotrain.json to name its target: give target= a model or its path")
    name = str(metadata.target["name"])
    if metadata.origin.get("adapter"):
        both = f"{name} with the adapter {metadata.origin['adapter']}"
        raise ValueError(f"{folder}: the draft was made for {both}; give target= the merged model or its folder")
    return name


def _refuse_policy(folder: Path, policy: Any) -> None:
    if isinstance(policy, Adaptive) and policy.draft not in (None, folder_identity(folder)):
        raise ValueError(
            f"policy: it was fitted to another draft than {folder}: give the policy.json that "
            f"cotrain plan draft.path={folder} writes"
        )


def _with_defaults(metadata: Metadata | None, served: ServedAs, settings: dict[str, Any]) -> Metadata | None:
    """Add the folder's policy, rule and template arguments to `settings`, in place. Returns the folder's metadata,
    without its tree if the settings ask for chains. None if the folder has no metadata."""
    tree = metadata.tree if metadata else None
    settings.setdefault("template", served.template)
    if metadata is None or tree is None or "policy" in settings or not rule_of(settings.get("verify", tree.rule)).trees:
        settings.setdefault("policy", Fixed(metadata.k if metadata else 4))
        settings.setdefault("verify", served.verify)
        return replace(metadata, tree=None) if metadata else None
    settings |= {"policy": Fixed(tree.depth), "verify": settings.get("verify", tree.rule)}
    return metadata
