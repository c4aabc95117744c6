"""What a round needs of many rows at once, as tensors on their device."""
