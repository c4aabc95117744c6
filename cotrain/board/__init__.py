"""The logging of a training run to TensorBoard and Weights & Biases: curves, texts and final figures."""
