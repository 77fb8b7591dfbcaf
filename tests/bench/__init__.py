"""``make bench``: how fast and how big the node plugin is."""
