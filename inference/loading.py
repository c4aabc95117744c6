"""From a draft folder to an engine."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from inference.drafts.bundled_target import resolve
from inference.drafts.compatibility import hash_target
from inference.drafts.draft_folder import METADATA, Metadata, load_tokenizer, read
from inference.engine import Engine
from inference.models.lm import load_model
from inference.policy import Fixed
from inference.proposers import kind_of
from inference.proposers.base import Beside, Proposer
from inference.verify.rules import rule_of


def load(
    folder: str | Path, target: PreTrainedModel | str | Path | None = None, *, kind: str | None = None, **settings: Any
) -> Engine:
    """An engine from a draft folder, which knows its target and what to draft; `settings` as for Engine.

    A folder that was planned with a tree is served with it and its rule. A `policy` of one's own, or a rule that does
    not verify trees, drafts chains.

    target: a model (then give `tokenizer=`, or decode ids) or a path, when not the one that the folder names. kind: of
    a folder that was made elsewhere, as "other_tokenizer" of any causal LM; None: as the folder says.
    Raises ValueError for a folder that names no target, or one with an adapter, or an unknown kind, and whatever the
    kind's `load` refuses.
    """
    found = read(folder)
    made = found.metadata
    tokenizer = settings.pop("tokenizer", None)
    if target is None or isinstance(target, str | PathLike):
        if target is None and made is None:
            raise ValueError(f"{folder}: no cotrain.json names its target; give target=")
        if target is None and made and made.origin.get("adapter"):
            both = f"{made.target['name']} with the adapter {made.origin['adapter']}"
            raise ValueError(f"{folder}: made for {both}: give target= a folder that it was merged into, or the model")
        place = resolve(str(target or (made.target["name"] if made else "")))
        tokenizer = tokenizer or load_tokenizer(Path(place))
        target = load_model(place, settings.pop("dtype", None))
        if "device" in settings:
            target.to(settings.pop("device"))
    made = _drafting(made, settings)
    beside = Beside(target, hash_target(target.config, tokenizer), made, settings.get("compile"), tokenizer)
    try:
        proposes = kind_of(kind or found.kind)
    except ValueError as error:
        raise ValueError(f"{'load(kind=)' if kind else found.path / METADATA}: {error}") from error
    if made and made.tree and not takes_shape(proposes):
        raise ValueError(f"{found.path / METADATA}: tree: {found.kind} drafts chains alone")
    proposer = proposes.load(found.path, beside)
    return Engine(target, proposer, tokenizer=tokenizer or load_tokenizer(found.path), **settings)


def _drafting(made: Metadata | None, settings: dict[str, Any]) -> Metadata | None:
    """What the folder says of itself, its tree left out where the settings ask for chains; fills in policy and rule."""
    tree = made.tree if made else None
    if made is None or tree is None or "policy" in settings or not rule_of(settings.get("verify", tree.rule)).trees:
        settings.setdefault("policy", Fixed(made.k if made else 4))
        return replace(made, tree=None) if made else None
    settings |= {"policy": Fixed(tree.depth), "verify": settings.get("verify", tree.rule)}
    return made


def takes_shape(maker: Callable[..., Proposer]) -> bool:
    """Whether a kind can draft trees: its class, or what makes one of it, takes `shape`."""
    return "shape" in inspect.signature(maker).parameters
