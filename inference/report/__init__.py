"""Reports: their data and their table, and replays of single generations."""
