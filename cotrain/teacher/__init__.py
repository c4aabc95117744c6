"""The frozen target: loading it, what is read of it, and what is kept of that."""
