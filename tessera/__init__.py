"""The ``tessera`` command and the composition of the processes."""
