"""Causal LMs in draft folders. Some have modules of this project; their config.json names these.

A plain Hugging Face folder is loaded by transformers alone. A `Part` describes one module that is added to a causal LM
of any family: a small head, a Markov head, or the scale of a draft that is conditioned on the temperature. All other
weights keep their names, so a draft can start from the weights of a folder without the module. A kind of draft with
another module defines a subclass of `CausalLM` that lists its `Part`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel

from inference.drafts.weight_files import weight_files
from inference.models.markov import MARKOV, put_markov_head
from inference.models.pretrained import auto_class
from inference.models.small_heads import RANK, VOCABULARY, is_small, put_small_head

GENERATION = "generation_config.json"


class Part(NamedTuple):
    """A module of this project that is added to a causal LM.

    keys: keys of config.json; a network has the module if one of them is set. put: the function that adds the untrained
    module to the network and returns the module; it raises ValueError if the config does not describe the module.
    required: whether every network of the class has the module.
    """

    keys: tuple[str, ...]
    put: Callable[[PreTrainedModel], nn.Module]
    required: bool = False


SMALL_HEAD = Part((VOCABULARY, RANK), put_small_head)
MARKOV_HEAD = Part((MARKOV,), put_markov_head)


class CausalLM:
    """The network class of draft folders with a causal LM or an encoder-decoder (`Proposer.network_class`). It has no
    instances: calling it, or `from_pretrained`, returns a network of transformers' own class. parts: the modules that
    such networks may have in addition."""

    config_class = AutoConfig
    parts: tuple[Part, ...] = (SMALL_HEAD, MARKOV_HEAD)  # in the order in which they are put

    def __new__(cls, config: PretrainedConfig) -> Any:
        """Return an untrained network with this config."""
        network = auto_class(config).from_config(config)
        cls.put(network)
        return network

    @classmethod
    def has_parts(cls, config: PretrainedConfig) -> bool:
        """Return whether a network with this config has modules of this project."""
        return bool(cls._present(config))

    @classmethod
    def put(cls, network: PreTrainedModel) -> list[str]:
        """Add the modules that the network's config names to the network, in place. Return the modules' names in the
        network."""
        modules = [part.put(network) for part in cls._present(network.config)]
        return [name for name, module in network.named_modules() if any(module is one for one in modules)]

    @classmethod
    def _present(cls, config: PretrainedConfig) -> list[Part]:
        return [part for part in cls.parts if part.required or any(getattr(config, key, None) for key in part.keys)]

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, dtype: Any = "auto", output_loading_info: bool = False, **options: Any
    ) -> Any:
        """Return the network in a folder or on the hub, with this project's modules. It is loaded from safetensors.

        output_loading_info: whether to return (network, report) instead; transformers' loading report then covers these
        modules' tensors too. options: arguments of transformers' `from_pretrained`. path: the folder or hub id. dtype:
        of the weights; "auto" for the checkpoint's own. Raises ValueError if the config does not describe a module
        properly.
        """
        code = {"trust_remote_code": options.get("trust_remote_code", False)}
        config = AutoConfig.from_pretrained(path, **code)
        if not cls.has_parts(config):
            reported: Any = {"output_loading_info": True} if output_loading_info else {}
            return auto_class(config).from_pretrained(path, dtype=dtype, **reported, **options)
        with torch.device("meta"):
            sketch = auto_class(config).from_config(config, **code)
            own = tuple(f"{name}." for name in cls.put(sketch))
        folder = folder_of(path)
        tensors = tensors_of(folder)
        ours = {name: tensors.pop(name) for name in list(tensors) if name.startswith(own)}
        if is_small(config):  # transformers then makes no whole head, and misses none; the part unties it again
            config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = True
        network, info = type(sketch).from_pretrained(
            None, config=config, state_dict=tensors, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
        if (folder / GENERATION).is_file():
            network.generation_config = generation_of(folder)
        cls.put(network)
        _fill(network, own, ours, info)
        return (network, info) if output_loading_info else network


def folder_of(path: str | Path) -> Path:
    """Return the local folder of a model. path: a folder, returned unchanged, or a hub id. For a hub id, fetch missing
    files first (JSON files, and weights in safetensors), and return the snapshot's folder in the hub's cache."""
    if Path(path).is_dir():
        return Path(path)
    return Path(snapshot_download(str(path), allow_patterns=["*.json", "model*.safetensors"]))


def tensors_of(path: str | Path) -> dict[str, Tensor]:
    """Return all tensors in the safetensors files of a folder or hub id, by name, on the CPU."""
    return {name: value for file in weight_files(folder_of(path)) for name, value in load_file(file).items()}


@torch.no_grad()
def _fill(network: PreTrainedModel, own: tuple[str, ...], ours: dict[str, Tensor], info: dict[str, Any]) -> None:
    """Copy the tensors `ours` into this project's modules, whose names begin with one of `own`. Missing, mismatched and
    unexpected tensors are added to `info` (transformers' loading report), in place. network: has the modules."""
    wanted = {name: tensor for name, tensor in network.state_dict().items() if name.startswith(own)}
    missing = {name for name in info["missing_keys"] if not name.startswith(own)}
    info["missing_keys"] = missing | (wanted.keys() - ours.keys())
    info["unexpected_keys"] = {*info["unexpected_keys"]} | (ours.keys() - wanted.keys())
    for name in sorted(wanted.keys() & ours.keys()):
        if ours[name].shape != wanted[name].shape:
            info["mismatched_keys"] = [*info["mismatched_keys"], (name, ours[name].shape, wanted[name].shape)]
        else:
            wanted[name].copy_(ours[name])


def generation_of(folder: Path) -> GenerationConfig:
    """Return what the generation_config.json of a folder says. Raises ValueError, which names the file, if it says what
    transformers does not take."""
    try:
        return GenerationConfig.from_pretrained(folder)
    except Exception as error:  # TypeError, ValueError, OSError, ..., by key
        raise ValueError(
            f"{folder / GENERATION}: {str(error).strip().splitlines()[0]}: correct or delete it"
        ) from error
