"""Other drivers that allocate GPUs of the same node."""
