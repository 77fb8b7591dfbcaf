"""ResourceSlices: attributes, content, names, and publication."""
