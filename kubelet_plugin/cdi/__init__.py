"""CDI specs, and the driver files that they mount."""
