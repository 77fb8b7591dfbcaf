"""What people and pages are shown of the cluster: views, the map, explanations of pending claims."""
