"""Arrays: masks, grids, keys, counts, metrics."""
