"""A public trace of requests: how full a fleet gets with it, and how many find room while others come and go.

``tasks.csv`` has facts of the 7,064 GPU tasks of Alibaba's ``cluster-trace-gpu-v2023`` (Weng et al., "Beware of
Fragmentation", USENIX ATC 2023), in order of arrival: seconds, GPUs, thousandths of a GPU.
"""
