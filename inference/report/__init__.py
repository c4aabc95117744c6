"""Reports. This package builds their data and their table, and records single generations for replay."""
