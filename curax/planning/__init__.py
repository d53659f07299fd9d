"""A run compiled ahead of time for devices that are not here: what it needs."""
