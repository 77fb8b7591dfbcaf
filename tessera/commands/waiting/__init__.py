"""The commands about pods that wait for devices."""
