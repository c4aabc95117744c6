"""The frozen target: loading, computing and caching its outputs."""
