"""Acceptance on held-out texts, its profile over temperature and context, and the comparison of runs."""
