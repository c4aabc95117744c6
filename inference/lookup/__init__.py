"""Look-up of earlier occurrences of a text's last tokens, in the text itself or in a corpus on disk."""
