"""Default settings that follow the size of the target (docs/choosing.md): the kind of draft, its vocabulary, the
learning rate, the number of texts and the batch.

Targets below `BY_SIZE[0].least` parameters and encoder-decoders keep the defaults of the classes in `cotrain.config`.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from transformers import AutoConfig, PreTrainedModel

from cotrain.config.drafts import DRAFTS, Draft, EagleDraft, IndependentDraft
from cotrain.config.groups import OF_PATH, ServedTarget
from cotrain.config.settings import RolloutConfig, TeacherConfig, TrainConfig
from cotrain.students.base import student_class
from cotrain.students.eagle import sizes_of
from cotrain.training.preconditions import size_of
from inference.drafts.bundled_target import resolve
from inference.drafts.weight_files import building
from inference.models.pretrained import auto_class

PAGE = "docs/choosing.md"
# the head of EAGLE-3's own training has as many, of 128,256 (github.com/SafeAILab/EAGLE, eagle/traineagle3/config.json)
VOCABULARY = 32_000
PRUNED = 2  # the head is pruned if the target's vocabulary is larger than this many times VOCABULARY
# of a config of a draft -> the setting; read only with init=scratch, which would give a layer of the bundled target
SHAPE = {"intermediate_size": "intermediate", "head_dim": "head_dim", "num_key_value_heads": "kv_heads"}


class BySize(NamedTuple):
    """Defaults for a size of target.

    least: the fewest parameters of such a target. lr: learning rate. texts: of a domain, for training. batch: texts of
    a process in a step.
    """

    least: float
    lr: float
    texts: int
    batch: int


# lr: 1e-4 in SpecForge's settings for gemma-3-1b (examples/configs), 5e-5 in those of EAGLE-3's authors for an 8B
# (eagle/traineagle3/ds_config.json), and so above it. texts: in 2,300 steps each is read about three times, as
# those of the draft in data/drafts/smollm2, which is accepted more often than one of 1,857 texts read 22 times
# (outputs/results/gpu.json).
# batch: 16, that of trainer=gpu, and half above 16 billion, where the draft's layer and the states of a text are larger
BY_SIZE = (BySize(0.5e9, 1e-4, 12_000, 16), BySize(3e9, 5e-5, 12_000, 16), BySize(16e9, 5e-5, 6_000, 8))


def follow_target(
    cfg: TrainConfig | RolloutConfig | TeacherConfig,
    given: Collection[str],
    stored: Mapping[str, Any] | None = None,
) -> str:
    """Set, in place, the settings in `cfg` that follow the target's size. Return a line for the user, "" if none does.

    given: dotted keys of the settings, and names of the groups, that the user chose; they are not changed. stored: the
    settings of the run that is resumed, whose values are used; None for a new run. If the target cannot be read,
    nothing is changed, and the command then says what is wrong with it.
    """
    try:
        target = _outline(cfg.target)
    except (OSError, ValueError):
        return ""
    size = size_of(target).parameters
    row = next((row for row in reversed(BY_SIZE) if size >= row.least), None)
    if row is None or target.config.is_encoder_decoder:
        return ""
    values, said = dict[str, Any](), list[str]()
    if isinstance(cfg, TrainConfig | TeacherConfig):
        cfg.draft = cast(Any, _kind(cfg, given, stored, target))
        said += [f"draft={cfg.draft.kind}"] * ("draft" not in given)
    if isinstance(cfg, TrainConfig):
        values |= _draft_values(cfg, target)
        whole_layers = "vocabulary" in type(cfg.draft).model_fields
        own_width = cfg.init.kind == "scratch" and cfg.draft.width is not None
        if whole_layers and not own_width:
            values["optimizer.lr"] = row.lr  # small layers, heads and low-rank changes learn at the default
        values["trainer.batch"] = row.batch * cfg.trainer.processes
    if isinstance(cfg, TrainConfig | RolloutConfig):
        values["rollout.texts"] = row.texts
    for key, value in values.items():
        group, _, name = key.partition(".")
        if key in given:
            continue
        value = (stored or {}).get(group, {}).get(name, value)
        setattr(getattr(cfg, group), name, value)
        said.append(f"{key}={'null' if value is None else value}")
    if not said:
        return ""
    source = "as in the run that is resumed" if stored else "so by default"
    return f"target.path={cfg.target.path}: {size / 1e9:.1f} B parameters, {source} {' '.join(said)} ({PAGE})"


def _outline(target: ServedTarget) -> PreTrainedModel:
    """Return the target on the meta device, from its config alone."""
    code, folder = target.trust_remote_code, resolve(str(target.path))
    with building(Path(folder)), torch.device("meta"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=code)
        return auto_class(config).from_config(config, trust_remote_code=code)


def _kind(
    cfg: TrainConfig | TeacherConfig, given: Collection[str], stored: Mapping[str, Any] | None, target: PreTrainedModel
) -> Draft:
    """Return the draft's settings: of the kind `eagle`, or of the run that is resumed, with the given values. Return
    `cfg.draft` if the user chose a kind or a folder, or set what only other kinds have, and if the draft cannot copy
    the target's layers."""
    typed = {key.partition(".")[2] for key in given if key.startswith("draft.")}
    chosen = "draft" in given or type(cfg.draft) is not IndependentDraft or "kind" in typed
    if chosen or cfg.draft.path or cfg.init.kind in OF_PATH:
        return cfg.draft
    draft = DRAFTS[(stored or {}).get("draft", {}).get("kind", EagleDraft.model_fields["kind"].default)]
    if not typed <= draft.model_fields.keys():
        return cfg.draft
    try:
        with torch.device("meta"):
            student_class("eagle").initial(EagleDraft(), cfg.init, target)
    except ValueError:
        return cfg.draft
    return draft(**{name: getattr(cfg.draft, name) for name in typed})


def _draft_values(cfg: TrainConfig, target: PreTrainedModel) -> dict[str, Any]:
    """Return the settings of an EAGLE-3 layer that follow the target, by dotted key; {} for other drafts, whose pruned
    heads vLLM and SGLang do not load, and for one with the shape of a folder."""
    if not isinstance(cfg.draft, EagleDraft) or cfg.init.kind in OF_PATH:
        return {}
    values, rows = dict[str, Any](), target.config.get_text_config().vocab_size
    if rows > PRUNED * VOCABULARY:
        values["draft.vocabulary"] = VOCABULARY
    if cfg.init.kind == "scratch":
        sizes = sizes_of(cfg.draft, target, True)
        values |= {f"draft.{name}": sizes[key] for key, name in SHAPE.items()}
    return values
