"""The frozen target, which the draft learns from: loading it, and computing and caching its states."""
