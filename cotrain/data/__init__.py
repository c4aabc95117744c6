"""Sources of text: prompts, conversations, corpora, and the parts that training reads."""
