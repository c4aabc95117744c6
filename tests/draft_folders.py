"""Draft folders of every kind that is trained here, as `cotrain train` begins them, of a target of `tests.folders`."""

from pathlib import Path
from typing import Any

from cotrain.config.groups import Draft, Init
from cotrain.students.base import student_class
from inference.drafts.compatibility import hash_target
from inference.drafts.draft_folder import Metadata, save
from inference.models.pretrained import load_model
from tests.folders import VOCABULARY, tokenizer

BARE: dict[str, Any] = dict.fromkeys(
    (
        "path",
        "datastore",
        "width",
        "intermediate",
        "head_dim",
        "kv_heads",
        "depths",
        "vocabulary",
        "head_rank",
        "encoder_layers",
        "bits",
        "inner",
        "mask",
        "markov",
    )
) | {"shortest": 1, "layers": 1, "rank": 0, "quantisation": "none", "temperatures": []}
SIZES: dict[str, dict[str, Any]] = {
    "conditioned": {"temperatures": [0.0, 0.7, 1.0]},
    "eagle": {"depths": 3, "intermediate": 64, "head_dim": 64, "kv_heads": 1},
    "p_eagle": {"depths": 3, "intermediate": 64, "head_dim": 64, "kv_heads": 1},
    "block": {"depths": 3, "head_dim": 64},
    "early_exit": {"depths": 3, "rank": 2},
    "parallel": {"depths": 3},
    "medusa": {"depths": 3},
    "hydra": {"depths": 3},
    "quantised": {"bits": 8},
    "two_levels": {"bits": 8, "inner": 2},
}


def draft_folder(path: Path, target: Path, kind: str, **settings: Any) -> Path:
    """A folder that names its target; it plans two drafts a round."""
    model, student = load_model(str(target)), student_class(kind)
    if kind == "two_levels":
        settings |= {"path": str(draft_folder(path.with_name(f"small draft of {path.name}"), target, "independent"))}
    draft = Draft(kind=kind, **BARE | SIZES.get(kind, {}) | settings)
    made = student(student.initial(draft, Init("target_layers", [0]), model), model, VOCABULARY)
    about = Metadata({"name": str(target), **hash_target(model.config, tokenizer())}, 2, kind=kind)
    return save(made.network, tokenizer(), path, about, None)
