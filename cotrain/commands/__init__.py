"""One file a command: `run(cfg)` does what `cotrain NAME` asks."""
