"""The workload classes (``manifests/``, a link to those of the Helm chart), CEL selectors and the linter."""
