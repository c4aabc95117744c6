"""From a draft folder to an engine."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from inference.drafts.bundled_target import resolve
from inference.drafts.compatibility import hash_target
from inference.drafts.draft_folder import METADATA, load_tokenizer, read
from inference.engine import Engine
from inference.models.lm import load_model
from inference.policy import Fixed
from inference.proposers import kind_of
from inference.proposers.base import Beside


def load(folder: str | Path, target: PreTrainedModel | str | None = None, **settings: Any) -> Engine:
    """An engine from a draft folder, which knows its target and draft length; `settings` as for Engine.

    target: a model (then give `tokenizer=`, or decode ids) or a path, when not the one that the folder names.
    Raises ValueError for a folder that names no target, or one with an adapter, or an unknown kind, and whatever the
    kind's `load` refuses.
    """
    found = read(folder)
    made = found.metadata
    tokenizer = settings.pop("tokenizer", None)
    if not isinstance(target, PreTrainedModel):
        if target is None and made is None:
            raise ValueError(f"{folder}: no cotrain.json names its target; give target=")
        if target is None and made and made.made.get("adapter"):
            both = f"{made.target['name']} with the adapter {made.made['adapter']}"
            raise ValueError(f"{folder}: made for {both}: give target= a folder that it was merged into, or the model")
        place = resolve(str(target or (made.target["name"] if made else "")))
        tokenizer = tokenizer or load_tokenizer(Path(place))
        target = load_model(place, settings.pop("dtype", None))
    settings.setdefault("policy", Fixed(made.k if made else 4))
    beside = Beside(target, hash_target(target.config, tokenizer), made, settings.get("compile"))
    try:
        kind = kind_of(found.kind)
    except ValueError as error:
        raise ValueError(f"{found.path / METADATA}: {error}") from error
    proposer = kind.load(found.path, beside)
    return Engine(target, proposer, tokenizer=tokenizer or load_tokenizer(found.path), **settings)
