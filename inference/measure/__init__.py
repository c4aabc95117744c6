"""Timing, costs of rounds, plans of trees, and the least time that a machine needs."""
