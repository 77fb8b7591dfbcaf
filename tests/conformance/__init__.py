"""Our CEL engine against the real API server and the real scheduler: expressions, devices, and what these said."""
