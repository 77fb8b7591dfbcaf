"""The MPS control daemon of a simulated node: programs that behave as NVIDIA's, and the NVML calls about them."""
