"""The page of a run. It is one HTML file with the run's speed, the reasons for it, and advice."""
