"""Config types, dotted names and command lines. The standard library alone."""
