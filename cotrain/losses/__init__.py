"""Losses between a target distribution and a draft distribution.

`divergences` has the losses per position, and `sequence` the losses per text. `names` lists them all, and `spec` parses
weighted sums of them. `batch` computes the loss of a batch of guesses, in chunks (`chunked`).
"""
