"""Rolling updates: two instances of the node plugin on one node."""
