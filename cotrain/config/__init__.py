"""Types of settings, their ranges, and the parsing of the command line."""
