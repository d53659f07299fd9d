"""A run in its folder: checkpoints, records, alarms, pictures."""
