"""Commands of the console script, one file per command. `run(cfg)` executes `cotrain NAME`."""
