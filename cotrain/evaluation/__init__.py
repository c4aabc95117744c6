"""Evaluation on held-out texts: acceptance, its profile over temperature and context, and the comparison of runs."""
