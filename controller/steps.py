"""The steps of the controller, by name (``driver.steps``)."""

from __future__ import annotations

from enum import StrEnum

from driver.steps import StepObserver


class Step(StrEnum):
    """``decide`` has a ``write-plan`` for each plan that changed; beside it run those of the fence, in this order.

    ``lift`` is wherever devices are let go; ``withdraw`` hands what is free to the next decision.
    """

    DECIDE = "decide"
    WRITE_PLAN = "write-plan"

    FENCE = "fence"
    SETTLE = "settle"
    PROBE = "probe"
    CANARY = "canary"
    CATCH_UP = "catch-up"
    CHECK = "check"
    LIFT = "lift"
    WITHDRAW = "withdraw"


Observer = StepObserver[Step]
