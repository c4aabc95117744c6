"""Reports: their data, their table, and recordings of single generations for replay on a page."""
