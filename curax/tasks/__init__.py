"""Tasks: prompts and a verifier, a file each."""
