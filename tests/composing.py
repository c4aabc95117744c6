"""Commands that compose their settings in 0.02 s, as tests and studies run them by the thousand."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, replace
from typing import Any

import pytest
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.defaults_list import DefaultsList, Overrides
from hydra._internal.hydra import Hydra
from hydra.core.override_parser.overrides_parser import OverridesParser

from cotrain.paths import folder


@contextmanager
def composing_fast() -> Iterator[None]:
    """A command composes its settings once; each file of `conf` and each word is parsed once per process, and files
    that were merged are not merged again: 0.02 s for 0.17 s.

    Hydra composes twice, the first time for `hydra.mode` alone. Unless a setting names that, the mode follows from
    `-m`. Which files are merged depends on the groups that a command names, and not on the values that it sets
    afterwards.
    """
    mode, load, parsed = Hydra.get_mode, FileConfigSource.load_config, dict[str, Any]()
    list_files, merge = config_loader_impl.create_defaults_list, ConfigLoaderImpl._compose_config_from_defaults_list
    lists, merged = dict[Any, DefaultsList](), dict[Any, Any]()
    parse, words = OverridesParser.parse_rule, dict[Any, Any]()

    def get_mode(hydra: Hydra, config_name: str | None, overrides: list[str]) -> Any:
        return mode(hydra, config_name, overrides) if any("hydra.mode" in text for text in overrides) else None

    def load_config(source: FileConfigSource, config_path: str) -> Any:
        if source.path != str(folder("conf")):
            return load(source, config_path)
        if config_path not in parsed:
            parsed[config_path] = load(source, config_path)
        return copy.deepcopy(parsed[config_path])

    def create_defaults_list(repo: Any, config_name: Any, overrides_list: list[Any], **settings: Any) -> DefaultsList:
        values = Overrides(repo=repo, overrides_list=overrides_list).config_overrides
        groups = [one.input_line for one in overrides_list if one not in values]
        key = config_name, *groups, *settings.values(), *(source.path for source in repo.get_sources())
        if key not in lists:
            lists[key] = list_files(repo, config_name, overrides_list, **settings)
        return replace(lists[key], config_overrides=values)

    def compose(loader: ConfigLoaderImpl, defaults: list[Any], repo: Any) -> Any:
        sources = {source.path for source in repo.get_sources()}
        if not sources <= {str(folder("conf")), "hydra.conf", ""}:
            return merge(loader, defaults, repo)
        key = tuple(map(astuple, defaults))
        if key not in merged:
            merged[key] = merge(loader, defaults, repo)
        return copy.deepcopy(merged[key])

    def parse_rule(parser: OverridesParser, word: str, rule_name: str) -> Any:
        if (word, rule_name) not in words:
            words[word, rule_name] = parse(parser, word, rule_name)
        return copy.copy(words[word, rule_name])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OverridesParser, "parse_rule", parse_rule)
        patch.setattr(config_loader_impl, "create_defaults_list", create_defaults_list)
        patch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", compose)
        patch.setattr(Hydra, "get_mode", get_mode)
        patch.setattr(FileConfigSource, "load_config", load_config)
        yield
