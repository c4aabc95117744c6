"""Settings of commands as Hydra composes them, and single settings by key."""

import copy
from functools import cache, reduce
from typing import Any

import yaml
from hydra import compose, initialize_config_dir

from cotrain.config.drafts import DRAFTS
from cotrain.config.groups import Bench
from cotrain.config.settings import checked, register
from cotrain.paths import folder

# sizes of a benchmark that drafts chains of two tokens, in the dtypes of the models
CHAINS: dict[str, Any] = {"depths": [2], "draft_dtype": "auto", "draft_int8": False}


@cache
def _composed(command: str, *overrides: str) -> Any:
    register()
    with initialize_config_dir(str(folder("conf")), version_base="1.3"):
        return checked(command, compose(command, overrides=list(overrides)))


def composed(*overrides: str, command: str = "train") -> Any:
    """Settings of a command, to be changed."""
    return copy.deepcopy(_composed(command, *overrides))


def pick(cfg: Any, key: str) -> Any:
    return reduce(getattr, key.split("."), cfg)


def put(cfg: Any, key: str, value: Any) -> None:
    group, _, name = key.rpartition(".")
    if key == "draft.kind":
        cfg.draft = DRAFTS[value]()
        return
    setattr(pick(cfg, group) if group else cfg, name, value)


def typed(cfg: Any, *overrides: str) -> Any:
    """The settings with more of them, key=value, which are not checked."""
    for key, _, value in (one.partition("=") for one in overrides):
        put(cfg, key, yaml.safe_load(value))
    return cfg


def resized(bench: Bench, **sizes: Any) -> Bench:
    """Other sizes of a benchmark, which are not checked."""
    return bench.model_copy(update=sizes)
