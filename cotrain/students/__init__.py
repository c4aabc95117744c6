"""The kinds of drafts before and during training. Each kind has one file."""
