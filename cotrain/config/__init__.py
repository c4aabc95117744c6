"""Settings of all commands. This package has their classes, and parses the command line."""
