"""What a simulated node keeps: its state files, and the load of its GPUs over time."""
