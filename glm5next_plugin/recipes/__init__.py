"""Sizes and shapes of the model that are worth a name."""
