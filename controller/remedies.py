"""What an operator has to do about GPUs whose MIG mode changes with a reset only (pure)."""

from __future__ import annotations

from collections.abc import Sequence

from controller.fleet import FleetGpu
from driver.model.gpu import MigMode

NEAREST = (MigMode.RESET_TO_ENABLE, MigMode.RESET_TO_DISABLE, MigMode.DISABLED, MigMode.ENABLED)
"""By how little there is left to do."""


def nearest_to_switch(gpus: Sequence[FleetGpu]) -> list[FleetGpu]:
    """Those of ``gpus``, which wait for another MIG mode, with the least left to do: the same for all of them."""
    modes = {entry.gpu.mig_mode for entry in gpus}
    mode = next((each for each in NEAREST if each in modes), None)
    return [entry for entry in gpus if entry.gpu.mig_mode is mode]


def reset_of(entry: FleetGpu) -> str:
    """The steps that are left until the MIG mode of ``entry`` has changed."""
    uuid = entry.gpu.uuid
    reset = f"nvidia-smi --gpu-reset -i {uuid}"
    match entry.gpu.mig_mode:
        case MigMode.RESET_TO_ENABLE | MigMode.RESET_TO_DISABLE:
            return f"the new mode is set already, so for gpu-{entry.number}, with nothing running on it: {reset}"
        case MigMode.DISABLED:
            flag = f"--mig-gpus={uuid}"
            return (
                f"for gpu-{entry.number}: start its node plugin with {flag} (nodePlugin.extraArgs={{{flag}}}), "
                f"then, with nothing running on the GPU: {reset}"
            )
        case _:
            return (
                f"for gpu-{entry.number}, with nothing running on it: name it no more in its node plugin's --mig-gpus, "
                f"then nvidia-smi -i {uuid} -mig 0, then {reset}"
            )
