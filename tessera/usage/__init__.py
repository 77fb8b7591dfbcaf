"""Usage of GPUs by claim: from the pages of node plugins or from Prometheus, by tenant, with its cost."""
