"""The settings of look-up, in the place where other kinds have a network."""

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from inference.proposers.settings_network import SettingsNetwork


class LookupConfig(PretrainedConfig):
    """lookup: shortest, and the folder of a datastore or None."""

    model_type = "lookup"

    def __init__(self, lookup: Mapping[str, Any] | None = None, **other: Any) -> None:
        super().__init__(**other)
        self.lookup = dict(lookup or {})


class LookupNetwork(SettingsNetwork):
    """No weights: `LookupConfig` alone."""

    config_class = LookupConfig
