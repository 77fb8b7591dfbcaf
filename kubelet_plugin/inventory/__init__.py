"""The GPUs of the node, the claims that hold their devices, and the devices to publish."""
