"""The commands that take a GPU out of use and back."""
