"""What is said of pending claims, checked by doing what it says: by the real scheduler, or its allocator in Python."""
