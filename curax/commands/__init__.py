"""Commands of `curax` that are a file each, and recipes from elsewhere (`foreign`)."""
