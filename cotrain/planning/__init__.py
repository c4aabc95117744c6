"""Forecast of speed before deployment, from expected target calls on the target's texts and costs of rounds on this
machine."""
