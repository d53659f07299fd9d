"""What a recipe optimises, computed before any training."""
