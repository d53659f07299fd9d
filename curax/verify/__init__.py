"""Verifiers outside JAX: comparison of answers, graders, and processes for them."""
