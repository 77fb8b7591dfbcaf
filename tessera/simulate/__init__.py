"""What the scheduler would do: its allocator of devices, and imagined clusters for `tessera simulate`."""
