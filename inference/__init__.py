"""Exact batched speculative decoding of Hugging Face causal LMs; needs torch, transformers and safetensors."""

from inference.engine import Engine, Event, Output
from inference.loading import load
from inference.sampling import Sampling

__all__ = ["Engine", "Event", "Output", "Sampling", "load"]
