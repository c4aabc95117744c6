"""Clients of other serving engines, vLLM's settings for drafts, and modules that run inside vLLM."""
