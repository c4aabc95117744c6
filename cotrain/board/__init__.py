"""What a training run writes to TensorBoard: names, groups and steps of its curves, texts and final figures."""
