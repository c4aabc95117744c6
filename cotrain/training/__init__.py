"""Training of a draft: the checks before a run, the parts of a run, its checkpoints and its signals."""
