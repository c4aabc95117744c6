"""Earlier occurrences of a text's suffix: in the text itself, or in a corpus on disk."""
