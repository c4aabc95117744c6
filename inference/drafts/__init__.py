"""Draft folders. This package reads and writes them, checks that draft and target fit, and writes files atomically."""
