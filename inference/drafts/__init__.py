"""Draft folders. This package reads and writes them, checks whether draft and target fit, and writes files
atomically."""
