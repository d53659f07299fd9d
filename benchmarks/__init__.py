"""Measurements of curax: beside its peers, and as its work grows."""
