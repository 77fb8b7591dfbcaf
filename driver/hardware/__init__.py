"""The node's GPUs: the Host protocol, NVML and sysfs behind it, and a simulator of both."""
