"""Which network a draft folder holds, by its kind."""

from importlib import import_module
from typing import Any

NETWORKS = {  # kind -> module:class, imported when asked for
    "independent": "transformers:AutoModelForCausalLM",
    "hybrid": "transformers:AutoModelForCausalLM",
    "parallel": "transformers:AutoModelForCausalLM",
    "medusa": "inference.proposers.medusa_network:MedusaNetwork",
    "hydra": "inference.proposers.hydra_network:HydraNetwork",
}


def network_of(kind: str) -> Any:
    """What makes the network of a kind, from a configuration or a folder. Raises ValueError for a kind without one."""
    if kind not in NETWORKS:
        raise ValueError(f"kind is {kind!r}, which has no weights; those of {', '.join(NETWORKS)} are read")
    module, _, name = NETWORKS[kind].partition(":")
    return getattr(import_module(module), name)
