"""Monitors: measurements of completions that are logged and change no update."""
