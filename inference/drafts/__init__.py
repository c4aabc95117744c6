"""Draft folders: read, write, compatibility, whole files."""
