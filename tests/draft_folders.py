"""Draft folders of every kind that is trained here, as `cotrain train` begins them, of a target of `tests.folders`."""

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from cotrain.config.drafts import DRAFTS, OF_KINDS, Draft
from cotrain.config.groups import Init
from cotrain.students.base import Student, student_class
from inference.drafts.compatibility import hash_target, hash_weights
from inference.drafts.draft_folder import Metadata, save
from inference.models.pretrained import load_model
from tests.folders import VOCABULARY, tokenizer

BARE: dict[str, Any] = dict.fromkeys(OF_KINDS) | {"shortest": 1, "layers": 1, "rank": 0, "temperatures": []}
SIZES: dict[str, dict[str, Any]] = {
    "conditioned": {"temperatures": [0.0, 0.7, 1.0]},
    "eagle": {"depths": 3, "intermediate": 64, "head_dim": 64, "kv_heads": 1},
    "p_eagle": {"depths": 3, "intermediate": 64, "head_dim": 64, "kv_heads": 1},
    "block": {"depths": 3, "head_dim": 64},
    "early_exit": {"depths": 3, "rank": 2},
    "hybrid_exit": {"depths": 3, "rank": 2},
    "parallel": {"depths": 3},
    "medusa": {"depths": 3},
    "hydra": {"depths": 3},
    "quantised": {"bits": 8},
    "hybrid_quantised": {"bits": 8},
    "two_levels": {"bits": 8, "inner": 2},
}


def bare(kind: str, **settings: Any) -> Draft:
    """The settings of a small draft, and nothing set that need not be."""
    known = {**BARE, **SIZES.get(kind, {})}
    return DRAFTS[kind](**{key: known[key] for key in DRAFTS[kind].model_fields.keys() & known.keys()} | settings)


def new_student(kind: str, target: PreTrainedModel, **settings: Any) -> Student:
    """The student of an untrained draft of the target. A draft of two levels needs `path`, its small draft's folder."""
    student = student_class(kind)
    return student(
        student.initial(bare(kind, **settings), Init(kind="target_layers", layers=[0]), target), target, VOCABULARY
    )


def draft_folder(path: Path, target: Path, kind: str, **settings: Any) -> Path:
    """A folder that names its target; it plans two drafts a round."""
    if kind == "two_levels":
        settings |= {"path": str(draft_folder(path.with_name(f"small draft of {path.name}"), target, "independent"))}
    return written(path, target, new_student(kind, load_model(str(target)), **settings))


def written(path: Path, target: Path, made: Student, int8: bool = False) -> Path:
    """The folder of a student's draft."""
    hashes = hash_target(made.target.config, tokenizer()) | {"weights": hash_weights(str(target))}
    about = Metadata({"name": str(target), **hashes}, 2, kind=made.kind, int8=int8)
    return save(made.network, tokenizer(), path, about, None)


def copied(path: Path, old: Path, change: Any = None, **config: Any) -> Path:
    """A copy of a folder with other tensors and another config.json."""
    shutil.copytree(old, path)
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | config))
    if change:
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path
