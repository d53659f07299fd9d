"""The processes of one run: how they start, what they exchange, when they end."""
