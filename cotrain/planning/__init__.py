"""Forecast of speed before deployment: expected target calls on texts of the target, and costs of rounds here."""
