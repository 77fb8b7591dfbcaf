"""The workload classes, as files that people install and edit (``manifests/``, a link to those in the Helm chart)."""
