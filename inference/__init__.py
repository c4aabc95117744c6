"""Exact batched speculative decoding of Hugging Face causal LMs. It needs torch, transformers, safetensors and numpy.

Imports are lazy: `measure.contention` must set how threads wait before torch is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inference.engine import Engine
    from inference.loading import load
    from inference.output import Event, Output
    from inference.sampling import Sampling

__all__ = ["Engine", "Event", "Output", "Sampling", "load"]
_HOMES = {"Engine": "engine", "Event": "output", "Output": "output", "load": "loading", "Sampling": "sampling"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
