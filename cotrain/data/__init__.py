"""Sources of text: prompts, conversations and corpora, their splits, and the data sets that training reads."""
