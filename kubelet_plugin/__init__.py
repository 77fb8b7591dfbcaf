"""The node plugin: registers with the kubelet, prepares and unprepares claims, cuts and removes partitions."""
