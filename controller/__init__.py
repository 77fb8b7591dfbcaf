"""The controller of the cluster: decides which devices each node offers, and explains pending claims."""
