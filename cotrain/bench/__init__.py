"""Measurements of a target and its draft with the bundled engine. They cover speed, draft length, a matrix of engines,
quantisation, and the acceptance of a server."""
