"""Logging of a training run to TensorBoard and Weights & Biases. Curves, texts and final figures are logged."""
