"""What judges a completion outside JAX: answers, graders, and processes for them."""
