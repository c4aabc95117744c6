"""The shipped target and its tokenizer, and how they were made."""
