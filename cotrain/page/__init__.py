"""The page of a run: one HTML file that answers how fast, why, and what to do next."""
