"""Draft folders in the layouts that serving engines load."""
