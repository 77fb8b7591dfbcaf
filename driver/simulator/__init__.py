"""A stateful fake of a GPU node: the pynvml functions, sysfs, procfs and device nodes, kept in a directory.

Production code uses ``SimulatedNode.nvml`` in place of the module pynvml and its ``root`` in place of ``/``.
"""
