"""Losses between a target distribution and a draft distribution.

`divergences` has the formulas per position, and `sequence` those per text. `names` lists the losses, and `spec` reads
weighted sums of them. `batch` computes the loss of a batch of guesses, in the chunks of `chunked`.
"""
