"""Texts sampled from the target, and what made those that are kept."""
