"""The map of the GPUs."""
