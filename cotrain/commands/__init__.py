"""One file per command: `run(cfg)` executes `cotrain NAME`."""
