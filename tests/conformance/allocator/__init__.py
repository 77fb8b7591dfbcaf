"""The allocator of `tessera simulate` against the real scheduler, on generated scenarios."""
