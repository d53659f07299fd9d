"""Policies: Linen modules behind `curax.types.Model`."""
