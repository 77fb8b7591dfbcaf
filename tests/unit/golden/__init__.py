"""Kept outputs that tests compare with. Renewing them takes a command of its own: see ``__main__``."""
