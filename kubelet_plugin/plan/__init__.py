"""Following the controller's plan, and reporting the state of the node to the controller."""
