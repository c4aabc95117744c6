"""Types of settings, what values they may have, and what is typed on a command line."""
