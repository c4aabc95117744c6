"""A training run: what it asks, how it is wired, its steps, phases, checkpoints and signals."""
