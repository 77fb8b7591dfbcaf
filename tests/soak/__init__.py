"""Hundreds of random claims a minute against a real node plugin process, and what must not have grown by the end."""
