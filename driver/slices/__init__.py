"""From devices to ResourceSlices, and keeping those published."""
