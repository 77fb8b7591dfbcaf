"""Least privilege, proven: what the chart grants compared with what the processes asked for while the tests ran."""
