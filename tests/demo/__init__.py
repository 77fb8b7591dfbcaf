"""``make demo``: the main job, told on a terminal."""
