"""The sources of reasons, in the order of ``controller.explain.pipeline``, and what they share."""
