"""Methods with a state, or with draws of their own: a file each."""
