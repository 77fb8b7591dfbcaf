"""The controller at a thousand nodes, and at five thousand: ``make bench-fleet``."""
