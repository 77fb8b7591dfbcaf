"""The record of each claim, kept on disk, and the locks around it."""
