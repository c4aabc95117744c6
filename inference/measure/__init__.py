"""Measurement of speed. This package times engines, predicts the costs of rounds, plans trees, and bounds the time from
below.
"""
