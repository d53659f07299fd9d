"""Methods that add a state or draws of their own to a step, a file each."""
