"""Commands of `curax` that are a file each: `curax NAME`."""
