"""Comparisons of recipes: many runs, side by side, and what they carry in words."""
