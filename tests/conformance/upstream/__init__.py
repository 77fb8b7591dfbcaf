"""Changes of Kubernetes that may come, and whether Tessera works with them."""
