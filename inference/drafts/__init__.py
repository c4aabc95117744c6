"""Draft folders: reading, writing and compatibility; atomic writes of files."""
