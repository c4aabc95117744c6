"""Clients of serving engines, and a proposer class for vLLM."""
