"""The process of the MPS daemons is killed at its lines, in turn; the next one repeats the requests."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from kubelet_plugin.mps import control_daemons, control_tool
from kubelet_plugin.mps.control_daemons import ControlDaemons
from kubelet_plugin.mps.control_tool import ControlError
from kubelet_plugin.mps.protocol import CLIENT, LEGACY, NAMESPACES, PIPE, SERVER, gpu_directory
from tests.support.mps import LEGACY as DRIVER_580
from tests.support.mps import WITH_PROTOCOL_3 as DRIVER_615
from tests.support.mps import MpsNode, mps_node, running

OFTEN = 3
"""Times that a line counts: a loop over all processes of the machine is one place, not thousands."""

FILES = {control_daemons.__file__, control_tool.__file__}


def requests(mps: MpsNode, protocol: int) -> list[dict[str, Any]]:
    """A daemon's life: started, a claim comes, another goes, the daemon is ended."""
    start = {"program": str(mps.program), "library": "", "protocol": protocol}
    return [
        {"request": name, "gpu": mps.gpu, **fields}
        for name, fields in [
            ("start", start),
            ("limit", {"namespace": "a", "memory": 2048, "threads": 30}),
            ("remove", {"namespace": "b", "memory": 2048, "threads": 30}),
            ("end", {}),
        ]
    ]


def is_killed_at(number: int, act: Callable[[], None]) -> bool:
    """Whether a process that does ``act`` comes to its line of that number, where it is killed."""
    child = os.fork()
    if child == 0:
        lines, seen = 0, Counter[tuple[str, int]]()

        def count(frame: FrameType, event: str, _: object) -> Any:
            nonlocal lines
            if frame.f_code.co_filename not in FILES:
                return None
            if event == "line":
                seen[frame.f_code.co_filename, frame.f_lineno] += 1
                lines += seen[frame.f_code.co_filename, frame.f_lineno] <= OFTEN
            if lines == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return count

        sys.settrace(count)
        act()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("driver", "protocol"), [(DRIVER_580, LEGACY), (DRIVER_615, NAMESPACES)], ids=["protocol 2", "protocol 3"]
)
@pytest.mark.parametrize("stride", [pytest.param(29, marks=pytest.mark.long), pytest.param(1, marks=pytest.mark.slow)])
def test_after_a_kill_at_any_line_a_repeat_limits_the_claim_and_the_end_leaves_nothing(
    driver: str, protocol: int, stride: int
) -> None:
    with mps_node(driver) as mps:
        base = mps.pipe.parent / "d"
        base.mkdir()
        first, second, *others, end = requests(mps, protocol)
        place = Path(gpu_directory(str(base), mps.gpu))
        pipe = place / (CLIENT if protocol == LEGACY else f"{PIPE}/{SERVER}/a")

        def live() -> None:
            daemons = ControlDaemons(str(base))
            for request in (first, second, *others, end):
                daemons.answer(request)

        number, kills = 1, 0
        while is_killed_at(number, live):
            again = ControlDaemons(str(base))
            for request in (first, second):
                again.answer(request)
            assert sum(" -d" in line for line in running(mps.node.root)) == 1, number
            assert "at most 2048Mi" in str(mps.load("--memory", "3Gi", pipe=pipe).exception), number
            again.answer(end)
            assert (list(base.iterdir()), running(mps.node.root)) == ([], []), number
            number, kills = number + stride, kills + 1
        assert number > 100
        assert kills


def test_a_program_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_tool, "RUN_TIMEOUT_SECONDS", 0.2)
    program = tmp_path / control_tool.PROGRAM
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    start = {"request": "start", "gpu": "GPU-1", "program": str(program), "library": "", "protocol": LEGACY}
    with pytest.raises(ControlError, match=r"-d: no answer within 0\.2 s"):
        ControlDaemons(str(tmp_path)).answer(start)
