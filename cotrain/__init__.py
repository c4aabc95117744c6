"""Draft models for speculative decoding: distilled for acceptance, measured, planned and exported."""

__version__ = "0.1.0"
