"""What the node plugin and the controller share; it imports neither."""
