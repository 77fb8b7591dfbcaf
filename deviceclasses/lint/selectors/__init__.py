"""Checks of the CEL selectors of classes and claims."""
