"""The workload classes, as files that people install and edit (``manifests/``)."""
