"""The steps of the controller, by name (``driver.step_observer``)."""

from __future__ import annotations

from enum import StrEnum

from driver.step_observer import StepObserver


class Step(StrEnum):
    """``decide`` includes a ``write-plan`` for each changed plan; the steps of the fence run meanwhile, in this order.

    ``lift`` occurs wherever the fence is lifted; ``withdraw`` hands unheld devices to the next decision.
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
