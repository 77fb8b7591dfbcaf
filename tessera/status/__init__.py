"""The checks of ``tessera status``."""
