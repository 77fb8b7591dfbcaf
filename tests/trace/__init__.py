"""How many functions of ours one prepare or one decision passes: ``make trace-prepare``, ``make trace-decision``."""
