"""Kinds of draft other than the independent one in a real vLLM, from the folders that `cotrain export` writes."""
