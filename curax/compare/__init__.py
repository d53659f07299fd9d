"""Comparisons of recipes: runs under equal budgets, statistics, figures, report."""
