"""The map of the GPUs: values, filters, drawings."""
