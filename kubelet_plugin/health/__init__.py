"""The health of GPUs: NVML events, hardware faults, device conditions, cordons."""
