"""Command-line overrides. This module quotes free text for Hydra, and rewords Hydra's errors for the user."""

import difflib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import cast

from cotrain.config.ranges import REMOVED, REMOVED_LOSSES
from cotrain.paths import folder

# Keys, by their last part, whose value is passed on literally. The value null unsets them, except those in TEXT.
TEXT = frozenset({"prompt"})
FREE_TEXT = TEXT | {"prompts", "path", "adapter", "datastore", "folder", "cache", "output", "log", "url", "check",
                    "report", "export", "vllm", "page", "push_to_hub",
                    "baseline"}  # fmt: skip
_NUMBER = re.compile(r"-?[\d.]+(e-?\d+)?|true|false", re.IGNORECASE)
MAIN = {"data": "path", "target": "path", "draft": "path", "regime": "temperature", "policy": "k"}  # of a group
PATHS = frozenset(f"{group}.path" for group, name in MAIN.items() if name == "path")  # each is another thing
LISTS = frozenset({"run"})  # keys that may be typed several times: the values become one list
MAPPINGS = ("data.template", "data.shares", "data.embedded_shares", "data.bytes", "data.held_out_bytes")
# Names of other programs -> the settings that do the same here, of which a command has at most one
ALIASES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("lr", "learning_rate"), ("optimizer.lr",)),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs", "max_steps", "steps"),
                    ("trainer.steps",)),
    **dict.fromkeys(("batch", "batch_size", "per_device_train_batch_size"),
                    ("trainer.batch", "bench.rows", "rollout.rows")),
    "gradient_accumulation_steps": ("trainer.accumulate",),
    **dict.fromkeys(("warmup_steps", "warmup_ratio"), ("optimizer.warmup",)),
    "max_grad_norm": ("trainer.clip",),
    **dict.fromkeys(("bf16", "fp16", "precision"), ("trainer.precision",)),
    "seed": ("trainer.seed", "bench.seed", "rollout.seed"),
    **dict.fromkeys(("num_gpus", "nproc_per_node"), ("trainer.devices",)),
    "report_to": ("trainer.logger",),
    "output_dir": ("output",),
    **dict.fromkeys(("model", "model_name_or_path", "target_model", "target_model_path"), ("target.path",)),
    **dict.fromkeys(("draft_model", "assistant_model", "speculative_model", "speculative_draft_model_path"),
                    ("draft.path",)),
    **dict.fromkeys(("dataset", "dataset_name", "train_file", "train_data_path", "path"), ("data.path",)),
    **dict.fromkeys(("num_speculative_tokens", "num_assistant_tokens", "speculative_num_steps", "gamma", "k"),
                    ("policy.k", "k", "bench.depths")),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "quantization"), ("quantisation",)),
    **dict.fromkeys(("torch_dtype", "dtype"), ("target.dtype",)),
    **dict.fromkeys(("max_tokens", "max_new_tokens"),
                    ("max_new_tokens", "bench.new_tokens", "new_tokens", "rollout.new_tokens")),
    **dict.fromkeys(("num_layers", "num_hidden_layers"), ("draft.layers",)),
    "hidden_size": ("draft.width",),
    **dict.fromkeys(("resume", "resume_from_checkpoint"), ("output",)),
    "init.path": ("draft.path",),
}  # fmt: skip
_SETTING = re.compile(r"(?P<sign>\+{0,2})(?P<key>\w[\w.@:/-]*)=(?P<value>.*)", re.DOTALL)


def quote(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the values of free-text and path keys quoted, so that Hydra leaves them unchanged.

    The value is all that follows `=`, including quotes, commas and `${...}`. These keys therefore cannot be swept.
    """
    return [_quoted(argument) for argument in _gathered(arguments)]


def _gathered(arguments: Sequence[str]) -> list[str]:
    """Merge `run=a run=b` into one argument, `run=['a','b']`, at the position of the first."""
    values: dict[str, list[str]] = {}
    gathered: list[str] = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key not in LISTS:
            gathered.append(argument)
        elif key in values:
            values[key].append(value)
        else:
            values[key] = [value]
            gathered.append(key)
    return [f"{one}=[{','.join(map(literal, values[one]))}]" if one in values else one for one in gathered]


def is_setting(argument: str) -> bool:
    """Return whether `argument` sets a value (`key=value`, `+key=value`) or removes one (`~key`). Flags do neither."""
    return argument.startswith("~") or _SETTING.match(argument) is not None


def _quoted(argument: str) -> str:
    setting = _SETTING.fullmatch(argument)
    if setting is not None and _NUMBER.fullmatch(setting["value"]) and (folder("conf") / setting["key"]).is_dir():
        return f"{setting['key']}={literal(setting['value'])}"  # an option's name, which Hydra wants to be no number
    if setting is not None and not setting["sign"] and _opens(setting["key"], setting["value"]):
        return f"++{argument}"
    if setting is None or not _literal(setting["key"], setting["value"]):
        return argument
    return f"{setting['sign']}{setting['key']}={literal(setting['value'])}"


def _opens(key: str, value: str) -> bool:
    """Return whether the setting adds the user's own names to a mapping. Hydra rejects these as unknown keys without
    `++`."""
    return (key in MAPPINGS and value.startswith("{")) or key.startswith(tuple(f"{name}." for name in MAPPINGS))


def _literal(key: str, value: str) -> bool:
    if key == "check" and value.lower() in ("true", "false"):
        return False
    if value == "null" and key not in TEXT:
        return False
    return key.rpartition(".")[2] in FREE_TEXT


def literal(text: str) -> str:
    """Return a Hydra value that resolves to exactly `text`."""
    from hydra.core.override_parser.types import Quote, QuotedString

    if text == "???":  # OmegaConf's mark of a missing value
        return "${oc.decode:'\"???\"'}"
    escaped = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
    return QuotedString(escaped, Quote.single).with_quotes()


def explain(error: Exception, command: str, arguments: Sequence[str]) -> str:
    """Return one line that says why Hydra rejected the `arguments` of `command`. It names the key and its allowed
    values."""
    settings = [match for match in map(_SETTING.fullmatch, arguments) if match]
    keys = _keys(command, settings)
    typed = {setting["key"]: setting["value"] for setting in settings}
    return (
        _path_for_group(typed, keys)
        or _several(typed, command, keys, error)
        or _unparsed(error)
        or _no_option(error, keys)
        or _no_key(error, command, keys)
        or _no_value(error, typed, keys)
        or _first(error)
    )


def _path_for_group(typed: Mapping[str, str], keys: Collection[str]) -> str | None:
    for key, value in typed.items():
        if f"{key}.path" in keys and not _NUMBER.fullmatch(value) and ("/" in value or os.path.splitext(value)[1]):
            return f"{key}={value}: {key}= cannot be a path: write {key}.path={value} instead"
    return None


def _several(typed: Mapping[str, str], command: str, keys: Mapping[str, object], error: Exception) -> str | None:
    """Return the error message for several values of one setting without -m, and for one value of a list."""
    for key, value in typed.items():
        said = f"{key}={value}: "
        if isinstance(keys.get(key), list) and "is not a ListConfig" in str(error.__cause__) and value[:1] != "[":
            return f"{said}it is a list: write {key}=[{value}]"
        if str(error).startswith("Ambiguous value") and f"'{key}={value}'" in str(error):
            if key not in keys:
                return unknown(key, command, keys)
            many = f"write {key}=[{value}]" if isinstance(keys.get(key), list) else f"give {key}= one value"
            return f"{said}several values: {many}, or add -m to run once for each"
    return None


def _unparsed(error: Exception) -> str | None:
    from hydra.errors import OverrideParseException

    if not isinstance(error, OverrideParseException):
        return None
    if "=" not in error.override:
        return f"{error.override!r} is not a setting: write key=value"
    return f"{error.override!r} cannot be read: {_first(error)}; quote the value, as in key='\"a, b\"'"


def _no_option(error: Exception, keys: Collection[str]) -> str | None:
    from hydra.errors import MissingConfigException

    if not isinstance(error, MissingConfigException) or not error.missing_cfg_file:
        return None
    group, _, option = error.missing_cfg_file.partition("/")
    if group == "loss" and option in REMOVED_LOSSES:
        return f"loss={option} was removed: set loss={REMOVED_LOSSES[option]}"
    if not error.options:
        return None
    main = f"{group}.{MAIN.get(group)}"
    number = _NUMBER.fullmatch(option) is not None
    hint = f"; a value of your own is {main}={option}" if main in keys and number != main.endswith(".path") else ""
    if not number and (near := difflib.get_close_matches(option, error.options, n=1, cutoff=0.75)):
        hint = f"; the nearest is {near[0]}"
    return f"{group}={option}: {group} is one of {', '.join(error.options)}{hint}"


def _no_key(error: Exception, command: str, keys: Collection[str]) -> str | None:
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError

    match = re.match(r"Could not (?:override|delete from config\.) '([^']+)'", str(error))
    if not match and not isinstance(error.__cause__, ConfigAttributeError | ConfigKeyError):
        return None
    key = match[1] if match else str(cast(ConfigKeyError, error.__cause__).full_key)
    return _below(key, keys) if key in keys else unknown(key, command, keys)


def unknown(key: str, command: str, keys: Collection[str]) -> str:
    """Return the error message for an unknown key; it names the most similar known key, or says that it was removed."""
    if key in REMOVED:
        return f"{key}= was removed: {REMOVED[key].instead}"
    last = "path" if key in PATHS else key
    same = sorted(other for other in keys if "." not in last and other.rpartition(".")[2] == last)
    if typo := difflib.get_close_matches(key, sorted(keys), n=1, cutoff=0.9):
        hint = f"the nearest is {typo[0]!r}"
    elif known := alias(key, keys):
        hint = f"the setting is {known}="
    elif len(same) > 1:
        hint = f"the settings of this name are {', '.join(f'{other}=' for other in same)}"
    else:
        near = nearest(key, keys)
        hint = f"the nearest is {near!r}" if near else f"`cotrain {command} --cfg job` shows all"
    return f"no key {key!r}; {hint}"


def alias(key: str, keys: Collection[str]) -> str | None:
    """Return the setting that does what `key` does in other programs, if the command has one."""
    settings = ALIASES.get(key) or ALIASES.get("" if key in PATHS else key.rpartition(".")[2], ())
    return next((known for known in settings if known in keys and key != known), None)


def flag(name: str, command: str) -> str:
    """Return the error message for a flag, such as --learning_rate, that is no flag here."""
    key = name.lstrip("-").replace("-", "_")
    keys = _keys(command, [])
    if key not in keys:
        key = alias(key, keys) or nearest(key, keys) or key
    return f"no flag {name}: settings are key=value, as in {key}=..."


def _no_value(error: Exception, typed: Mapping[str, str], keys: Collection[str]) -> str | None:
    from omegaconf.errors import ValidationError

    cause = error.__cause__
    if not isinstance(cause, ValidationError):
        return None
    key = str(cause.full_key)
    value = f"{key}={typed[key]}" if key in typed else key
    return _below(key, keys) or f"{value}: {_first(cause)}"


def _below(key: str, keys: Collection[str]) -> str | None:
    """Return the error message for a group of settings, which takes no value itself; None if `key` is no group."""
    below = sorted(other for other in keys if other.startswith(f"{key}."))
    return f"{key}= is a group of settings: set {', '.join(f'{other}=' for other in below)}" if below else None


def _first(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].strip()


def nearest(key: str, keys: Collection[str]) -> str | None:
    """Return the key most similar to `key`. Among similar keys, those with the same last part are preferred."""
    same = [other for other in sorted(keys) if other.rpartition(".")[2] == key.rpartition(".")[2]]
    near = difflib.get_close_matches(key, same or sorted(keys), n=1, cutoff=0.0 if same else 0.7)
    return near[0] if near else None


def _keys(command: str, settings: Iterable[re.Match[str]]) -> dict[str, object]:
    """Return every key of the command's configuration with the group options that the user typed, and its value.
    Return nothing if Hydra cannot compose the configuration."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    conf = folder("conf")
    typed = [(setting["key"], setting["value"]) for setting in settings]
    options = [f"{group}={option}" for group, option in typed if (conf / group / f"{option}.yaml").is_file()]
    try:
        began = GlobalHydra.instance().is_initialized()  # by a command that reads settings of another
        with nullcontext() if began else initialize_config_dir(str(conf), version_base="1.3"):
            config = OmegaConf.to_container(compose(command, overrides=options))
    except (HydraException, OmegaConfBaseException):
        return {}
    return dict(flat(config))


def flat(values: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield every dotted key of nested dictionaries with its value, including keys whose value is a dictionary."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield f"{prefix}{key}", value
            yield from flat(value, f"{prefix}{key}.")
