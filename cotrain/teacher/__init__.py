"""The frozen target. This package loads it, and computes and caches its outputs."""
