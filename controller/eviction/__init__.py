"""Evicting pods that can not start."""
