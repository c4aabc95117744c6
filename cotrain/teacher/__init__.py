"""The frozen target: loading it, reading it, caching its outputs."""
