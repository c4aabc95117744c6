"""The checks of a measured run, and their verdict."""
