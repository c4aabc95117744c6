"""Measurement of speed: timing of engines until an interval is narrow enough, costs of rounds, and plans of trees."""
