"""Serving engines seen from here: clients, and vLLM."""
