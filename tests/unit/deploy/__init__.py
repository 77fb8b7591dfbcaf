"""Unit tests of the chart, its classes, and the image."""
