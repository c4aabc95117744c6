"""The pair that a command serves: a draft folder, and the target that it names unless another one is given."""

import sys
from pathlib import Path

from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from cotrain.config.settings import BenchConfig, ServeCheckConfig
from cotrain.errors import UserError
from cotrain.training.preconditions import outline, same_tokenizer, sketch
from cotrain.training.sizes import size_of
from inference.drafts.draft_folder import Folder, load_tokenizer, read


def resolved(cfg: BenchConfig | ServeCheckConfig) -> str:
    """The target: `target.path`, or where it is null the one that the draft folder names, with its adapter; both are
    filled in. Raises UserError for a folder that is none, and one that names no target."""
    if cfg.draft.path is None:
        raise UserError("name the draft folder with draft.path=")
    made = folder(cfg.draft.path).metadata
    if cfg.target.path is None:
        if made is None:
            raise UserError(f"draft.path={cfg.draft.path} does not name its target: give target.path=")
        cfg.target.path = made.target["name"]
        cfg.target.adapter = cfg.target.adapter or made.made.get("adapter")
    return str(cfg.target.path)


def folder(path: str) -> Folder:
    """A draft folder, its weights unread. Raises UserError naming draft.path for any other."""
    try:
        return read(path)
    except (ValueError, OSError) as error:
        raise UserError(f"draft.path: {error}") from error


def refuse_pair(
    draft_path: str, target_path: str, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target without storage, and its tokenizer. A draft that is larger than it is measured, and said to be.

    Raises UserError, before weights are loaded, for a target that is not there and for a draft of other token ids.
    """
    try:
        target, tokenizer = outline(target_path, trust_remote_code)
        own = load_tokenizer(Path(draft_path))
        draft = sketch(draft_path, AutoConfig.from_pretrained(draft_path), key="draft.path")
    except (ValueError, OSError) as error:
        raise UserError(" ".join(str(error).split())) from error
    if own is not None:
        same_tokenizer(draft_path, target.config, tokenizer, draft.config, own)
    if size_of(draft).active > size_of(target).active:
        print(f"warning: draft.path={draft_path} is the larger model: it cannot make {target_path} faster",
              file=sys.stderr)  # fmt: skip
    return target, tokenizer
