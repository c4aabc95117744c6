"""The page of a run: one HTML file with its speed, the reasons for it, and advice."""
