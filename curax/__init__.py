"""curax: curate the learning signal of RLVR, in JAX."""

__version__ = "0.1.0"
