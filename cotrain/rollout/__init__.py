"""Texts sampled from the target, and the files that store them."""
