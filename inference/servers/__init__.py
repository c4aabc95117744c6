"""Clients and workers for other serving engines, and a proposer class that vLLM loads."""
