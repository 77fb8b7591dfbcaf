"""How much of their devices the prepared claims use."""
