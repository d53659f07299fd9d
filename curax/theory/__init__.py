"""Predictions of what a recipe optimises, computed before any training."""
