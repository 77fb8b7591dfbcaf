"""Explanations of pending claims for ``tessera why``."""
