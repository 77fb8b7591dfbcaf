"""The acceptance test: what a GPU and its driver can do, step by step, through the plugin that owns the GPU."""
