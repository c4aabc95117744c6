"""Texts that the target samples, and the files that store them."""
