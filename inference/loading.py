"""From a draft folder to an engine."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from inference.drafts.bundled_target import resolve
from inference.drafts.compatibility import hash_target
from inference.drafts.draft_folder import load_draft, load_tokenizer, read
from inference.engine import Engine
from inference.models.dtypes import widened
from inference.models.llama import can_round
from inference.models.lm import load_model
from inference.policy import Fixed
from inference.proposers.independent import Independent


def load(folder: str | Path, target: PreTrainedModel | str | None = None, **settings: Any) -> Engine:
    """An engine from a draft folder, which knows its target and draft length; `settings` as for Engine.

    target: a model (then give `tokenizer=`, or decode ids) or a path, when not the one that the folder names.
    Raises ValueError for a folder that names no target, or one with an adapter, and whatever `load_draft` refuses;
    warns of a target of another shape than the draft was made for.
    """
    made = read(folder).metadata
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
    draft, own, _ = load_draft(folder, target=hash_target(target.config, tokenizer))
    settings.setdefault("policy", Fixed(made.k if made else 4))
    torch.nn.Module.to(draft, target.device)
    greedy, rounded = (made.objective == "greedy", made.int8) if made else (False, False)
    compile = settings.get("compile")
    int8 = rounded and can_round(draft)
    proposer = Independent(draft if int8 else widened(draft), greedy, compile=compile, int8=int8)
    return Engine(target, proposer, tokenizer=tokenizer or own, **settings)
