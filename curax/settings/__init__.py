"""What configs and command lines are made of; no arrays."""
