"""Acceptance on held-out texts, and runs compared."""
