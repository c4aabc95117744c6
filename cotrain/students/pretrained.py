"""init=pretrained: a draft that begins with the weights of draft.path=.

That is a folder of a draft of its own kind, or of one whose weights mean the same; of kinds that are causal LMs, any
model of a folder or the hub. The folder says the shape. Names and shapes of its tensors are compared with its
config.json before any is read, also of a target that has no storage.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from cotrain.config.groups import Draft
from inference.drafts.draft_folder import read
from inference.drafts.weight_files import CONFIG, require_finite, weight_files
from inference.proposers import kind_of
from inference.proposers.conditioned_network import ConditionedNetwork

Shapes = Mapping[str, tuple[int, ...]]  # of tensors, by name

# kind -> others whose weights mean the same there; LMs of any origin are independent drafts
RELATED = {
    "independent": ("hybrid", "parallel"),
    "hybrid": ("independent", "parallel"),
    "parallel": ("independent", "hybrid"),
    "conditioned": ("independent", "hybrid", "parallel"),
    "p_eagle": ("eagle",),
}
FRESH = {"p_eagle": {"mask_hidden"}}  # tensors that the related kinds lack, and that begin as without a folder
LMS = (AutoModelForCausalLM, ConditionedNetwork)  # a scale is added once the LM is there
OTHERS = {"embed_tokens.weight"}  # that folders made elsewhere hold, a copy of the target's


def network_of(draft: Draft, target: PreTrainedModel) -> Any:
    """The network of draft.kind= with the weights of draft.path=, in float32; of a target without storage, without one
    too.

    Raises ValueError naming draft.path= for none, a folder of another kind, tensors that are missing, too many, of
    other shapes than config.json says or not finite, and for a target of other sizes.
    """
    path = draft.path
    if not path:
        raise ValueError("init.kind: 'pretrained' takes its weights from a folder or hub id: name it with draft.path=")
    kind, where = kind_of(draft.kind), f"draft.path={path}"
    _refuse_kind(draft.kind, path)
    if kind.network_class in LMS:
        return causal_lm(path, target)
    if not Path(path).is_dir():
        raise ValueError(f"{where}: no such folder; {draft.kind} drafts begin with the weights of one")
    network = _loaded(draft.kind, kind.network_class, Path(path), target.device)
    kind.fits(network, target, where)
    return network


def _refuse_kind(kind: str, path: str) -> None:
    """Raise ValueError for a folder that says that it holds a draft of a kind that this one cannot begin with."""
    made = read(path).metadata if Path(path).is_dir() else None
    known = (kind, *RELATED.get(kind, ()))
    if made is not None and made.kind not in known:
        raise ValueError(f"draft.path={path}: a draft of kind {made.kind}; draft={kind} begins with the weights of one "
                         f"of {', '.join(known)}")  # fmt: skip


def _loaded(kind: str, made: Any, path: Path, device: torch.device) -> PreTrainedModel:
    """The network that config.json says, with the folder's tensors."""
    try:
        config = made.config_class.from_pretrained(path)
    except (StrictDataclassError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"draft.path={path}: {CONFIG} is none of a draft of kind {kind}: {reason}") from error
    with torch.device("meta" if device.type == "meta" else "cpu"):
        network: PreTrainedModel = made(config)
    metadata, files = read(path).metadata, weight_files(path)
    lacking = set() if metadata is not None and metadata.kind == kind else FRESH.get(kind, set())
    wanted = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    if problems := differing(wanted, shapes_of(files), lacking):
        raise ValueError(f"draft.path={path}: {'; '.join(problems)}")
    if device.type != "meta":
        for file in files:
            network.load_state_dict({n: t for n, t in load_file(file).items() if n in wanted}, strict=False)
        require_finite(network, f"draft.path={path}")
    return network


def shapes_of(files: list[Path]) -> dict[str, tuple[int, ...]]:
    """Of all tensors of safetensors files, from their headers."""
    found: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(file, "pt") as tensors:
            found |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}
    return found


def differing(wanted: Shapes, found: Shapes, lacking: set[str]) -> list[str]:
    """What is wrong with the tensors that were found, one sentence each; `lacking` may be missing."""
    missing, more = set(wanted) - set(found) - lacking, set(found) - set(wanted) - OTHERS
    problems = [f"tensor {name} is missing" for name in sorted(missing)]
    problems += [f"tensor {name} is none of its network" for name in sorted(more)]
    for name in sorted(set(wanted) & set(found)):
        if wanted[name] != found[name]:
            problems.append(f"tensor {name} has shape {found[name]}, config.json says {wanted[name]}")
    return problems


def _config(path: str) -> PretrainedConfig:
    """Of a folder or hub id. Raises ValueError naming draft.path= where there is none."""
    try:
        found: PretrainedConfig = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"draft.path: {path} is no folder of a model, and none that the hub gave: {reason}") from error
    return found


def causal_lm(path: str, target: PreTrainedModel) -> PreTrainedModel:
    """Any causal LM from a folder or hub id, in float32, without the vocabulary rows that the target lacks.

    Of a target on the meta device, which has no weights, sizes alone. Raises ValueError when its vocabulary is the
    smaller one, and for tensors that are missing.
    """
    theirs, config = target.config.get_text_config().vocab_size, _config(path)
    ours = config.get_text_config().vocab_size
    if ours < theirs:
        raise ValueError(f"draft.path: {path} has {ours} ids, the target {theirs}")
    if target.device.type == "meta":
        config.get_text_config().vocab_size = theirs
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, use_safetensors=True, output_loading_info=True
    )
    network, info = loaded
    if info["missing_keys"]:
        raise ValueError(f"draft.path={path}: tensors are missing: {', '.join(sorted(info['missing_keys']))}")
    if ours > theirs:
        network.resize_token_embeddings(theirs)
    made: PreTrainedModel = network
    return made
