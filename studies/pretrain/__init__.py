"""Pretraining of the bundled target and its tokenizer, and n-gram baselines, whose figures are in its model card."""
