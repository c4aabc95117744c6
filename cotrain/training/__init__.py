"""Training of a draft: the checks before a run, the parts and phases of a run, its checkpoints and its signals."""
