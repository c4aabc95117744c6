"""Measuring a pair with the bundled engine: speed, draft lengths, grids, quantisation, a server."""
