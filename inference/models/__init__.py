"""Hugging Face models, and how their passes are run. `LM` has one forward for rows of different lengths."""
