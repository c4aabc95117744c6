"""Timing, costs of rounds, and the least time that a machine needs."""
