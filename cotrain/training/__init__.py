"""Training of a draft. This package has the requirements of a run, its parts, steps, phases, checkpoints and
signals."""
