"""Acceptance on held-out texts, its profile, and the comparison of runs."""
