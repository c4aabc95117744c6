"""Pretraining of the bundled target and its tokenizer, and the n-gram baselines in its model card."""
