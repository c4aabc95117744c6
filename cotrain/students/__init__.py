"""The kinds of drafts before and during training, one file for each kind."""
