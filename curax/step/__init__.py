"""One step of training, and the loops that make it."""
