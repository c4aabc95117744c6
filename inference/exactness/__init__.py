"""The checks of exactness, and their verdict."""
