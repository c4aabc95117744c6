"""Look-up of earlier occurrences of a text's suffix. They are searched in the text itself, or in a corpus on disk."""
