"""How devices are taken back (docs/taking-back.md), measured: ``make bench-preempt``."""
