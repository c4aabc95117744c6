"""Weights of a folder. They are read only from safetensors. They must be undamaged, complete, finite, and of the shapes
that config.json states. The ids of a pruned head must be ids of the target."""

import json
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel

from inference.models.small_heads import require_known

CONFIG, WEIGHTS = "config.json", "model.safetensors"
PICKLED = (".bin", ".pt", ".pth", ".ckpt")


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ValueError naming the file if it contains anything else."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is broken: {error}: copy or make the file again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} must hold a JSON object, not a {type(value).__name__}: copy or make the file again")
    return value


def json_if_any(file: Path) -> dict[str, Any]:
    """Return what `read_json` returns, or {} if there is no such file."""
    return read_json(file) if file.is_file() else {}


def wrong_keys(values: Mapping[str, Any], names: Set[str], optional: Set[str] = frozenset()) -> str:
    """Return which keys of a JSON object are missing and which are unknown, as text; "" if none is. names: the keys
    that it may have. optional: those of them that it may lack."""
    missing, unknown = sorted(names - optional - {*values}), sorted({*values} - names)
    if not missing and not unknown:
        return ""
    return f"keys missing: {', '.join(missing) or 'none'}; keys unknown: {', '.join(unknown) or 'none'}"


@contextmanager
def building(path: Path, network: Any = AutoModelForCausalLM) -> Iterator[None]:
    """If the `with` block fails to make a model, raise ValueError naming the config.json of the folder `path`. Errors
    of files and of memory are raised unchanged. network: the class of the model, for the message."""
    try:
        yield
    except (OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # by key: KeyError, TypeError, ZeroDivisionError, those of huggingface_hub, ...
        reason = " ".join(str(error).split("\n\n")[0].split())
        raise ValueError(f"{path / CONFIG}: this config cannot build {class_named(network)}: {reason}") from error


def load_weights(
    path: Path, dtype: torch.dtype | None = None, trust_remote_code: bool = False, network: Any = AutoModelForCausalLM
) -> tuple[PreTrainedModel, list[str], list[str]]:
    """Return the model in a folder, in eval mode; the problems of its weights, one sentence each; and the names of
    surplus tensors, which the config does not use.

    dtype: the model's dtype; None for the dtype in the folder. trust_remote_code: whether code in the folder may run.
    network: the class of the model. Problems are tensors that are missing or not finite, wrong shapes, and wrong ids of
    a pruned head. Raises FileNotFoundError or ValueError, naming the file, if the weights cannot be read.
    """
    files = weight_files(path)
    with building(path, network):
        loaded: Any = network.from_pretrained(
            path,
            dtype=dtype or "auto",
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, by name
        )
    model, info = loaded
    where = files[0] if len(files) == 1 else path
    problems = [f"{where}: tensor {name} is missing" for name in sorted(info["missing_keys"])]
    for name, own, wanted in sorted(info["mismatched_keys"]):
        problems.append(f"{where}: tensor {name} has shape {tuple(own)}, {CONFIG} says {tuple(wanted)}")
    if not problems:
        try:
            require_sound(model, str(where))
        except ValueError as error:
            problems.append(str(error))
    return model.eval(), problems, sorted(info["unexpected_keys"])


def class_named(network: Any) -> str:
    """Return the name of a network class for messages. None means a folder without weights."""
    if network is None:
        return "no weights"
    plain = network.__name__ in (AutoModelForCausalLM.__name__, "CausalLM")  # of `causal_lm`, which imports this module
    return "a causal language model" if plain else f"weights of {network.__name__}"


def weight_files(path: Path, name: str = WEIGHTS) -> list[Path]:
    """Return the safetensors files of a folder, after checking that each file is as long as its header says.

    name: name of the file. If the weights are in several files, an index named `<name>.index.json` lists them. Raises
    FileNotFoundError if a file is absent, and ValueError if weights are pickled or a file is damaged. path: the folder.
    """
    index = path / f"{name}.index.json"
    if not (path / name).is_file() and index.is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        if not names or any(part != Path(part).name for part in names):
            raise ValueError(f"{index}: weight_map must name files of this folder, not {names}")
        files = [path / part for part in names]
    else:
        files = [path / name]
    for file in files:
        _whole(file)
    return files


def refuse_other_sizes(folder: Path, model: PreTrainedModel) -> None:
    """Raise ValueError if a tensor in the folder has another size than the model's tensor of that name. This reads only
    the headers of the files."""
    wanted = model.state_dict()
    for file in weight_files(folder):
        for name, size in shapes_of([file]).items():
            if name in wanted and size != (own := tuple(wanted[name].shape)):
                raise ValueError(
                    f"{folder}: by {CONFIG} the tensor {name} has size {list(own)}, but in {file.name} it has size "
                    f"{list(size)}: use the {CONFIG} that belongs to these weights"
                )


def shapes_of(files: list[Path]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors in safetensors files, keyed by name. Only the headers of the files are read."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(file, "pt") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}
    return shapes


def differing(
    network: PreTrainedModel,
    stored: Mapping[str, tuple[int, ...]],
    optional: Set[str] = frozenset(),
    ignored: Set[str] = frozenset(),
) -> list[str]:
    """Return one sentence for each tensor whose name or shape differs. network: whose tensors are expected. stored: the
    shapes of a draft's tensors by name. optional: names of tensors that may be missing. ignored: names of tensors that
    may be superfluous."""
    expected = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    missing, superfluous = expected.keys() - stored.keys() - optional, stored.keys() - expected.keys() - ignored
    problems = [f"tensor {name} is missing" for name in sorted(missing)]
    problems += [f"tensor {name} does not belong to the network" for name in sorted(superfluous)]
    for name in sorted(expected.keys() & stored.keys()):
        if expected[name] != stored[name]:
            problems.append(f"tensor {name} has shape {stored[name]}, {CONFIG} says {expected[name]}")
    return problems


def _whole(file: Path) -> None:
    if not file.is_file():
        pickled = sorted(other for other in file.parent.iterdir() if other.suffix in PICKLED)
        if pickled:
            raise ValueError(
                f"{pickled[0]} is pickled, and weights are read from safetensors only: save them as {file.name}"
            )
        raise FileNotFoundError(f"{file.parent}: {file.name} is missing")
    try:
        with safe_open(file, "pt"):
            pass
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or cut short ({error}): copy it again") from error


def require_sound(model: PreTrainedModel, where: str) -> None:
    """Raise ValueError if a tensor of the model contains NaN or infinity, or if a pruned head has ids that the target
    lacks. where: the start of the message."""
    require_finite(model, where)
    require_known(model, where)


def require_finite(model: PreTrainedModel, where: str) -> None:
    """Raise ValueError if a tensor of the model contains NaN or infinity. where: the start of the message."""
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point():
            continue
        # 8-bit floats have no isfinite
        values = tensor.float() if tensor.itemsize == 1 else tensor
        if not bool(torch.isfinite(values).all()):
            raise ValueError(
                f"{where}: tensor {name} holds NaN or infinity in {tensor.dtype}: give other weights, or a wider dtype"
            )
