"""Settings of all commands. This package has their types and ranges, and parses the command line."""
