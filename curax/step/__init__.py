"""The training step, its drivers and the training loops."""
