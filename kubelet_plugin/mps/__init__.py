"""MPS: the process that runs control daemons in a pod of their own, and the node plugin's client of it."""
