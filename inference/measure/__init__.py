"""Measurement of speed: timing of engines, costs of rounds, plans of trees, and timing to a wanted interval."""
