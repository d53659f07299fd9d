"""Ahead-of-time plans of a run for absent devices: memory, time and communication."""
