"""Where the end of a text stood before: in the text itself, or in a corpus on disk."""
