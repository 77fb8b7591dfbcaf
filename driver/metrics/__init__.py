"""What every process measures of itself, for Prometheus. Loaded only where somebody asks for it."""
