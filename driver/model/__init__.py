"""Values and rules without I/O: GPU, profile, placement, device, occupancy, allocation."""
