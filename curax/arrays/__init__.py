"""Functions of arrays: checks, masked reductions, grids, keys, counts, metrics."""
