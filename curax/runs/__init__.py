"""A run in its folder: checkpoints, metrics, alarms, pictures."""
