"""Cgroups of pods, and limits on the GPU memory that their processes use."""
