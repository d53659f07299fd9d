"""Evaluations: problems drawn, completed, graded and counted."""
