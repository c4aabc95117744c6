"""Draft models for speculative decoding. This package distils them for acceptance, measures them, plans their draft
length and exports them."""

__version__ = "0.1.0"
