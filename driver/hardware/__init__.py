"""Hardware access: NVML, MIG, discovery, links, device nodes, sysfs."""
