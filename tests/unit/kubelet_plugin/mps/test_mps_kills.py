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
from tests.harness.waiting import wait_for
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


def daemons_of(mps: MpsNode) -> int:
    return sum(" -d" in line for line in running(mps.node.root))


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
            # A second, which the killed process began, may just be being refused.
            wait_for(lambda: daemons_of(mps) == 1, 20, f"one daemon runs after the kill at line {number}")
            assert "at most 2048Mi" in str(mps.load("--memory", "3Gi", pipe=pipe).exception), number
            again.answer(end)
            assert (list(base.iterdir()), running(mps.node.root)) == ([], []), number
            number, kills = number + stride, kills + 1
        assert number > 100
        assert kills


@pytest.mark.parametrize(
    ("driver", "protocol"), [(DRIVER_580, LEGACY), (DRIVER_615, NAMESPACES)], ids=["protocol 2", "protocol 3"]
)
def test_what_the_command_of_a_killed_process_still_does_is_not_taken_for_a_failure(driver: str, protocol: int) -> None:
    with mps_node(driver) as mps:
        base = mps.pipe.parent / "d"
        base.mkdir()
        program = mps.pipe.parent / "nvidia-cuda-mps-twice"
        program.write_text(f"""#!/bin/sh
case "$*" in
-d*|"server create"*|"namespace create"*|"namespace delete"*) {mps.program} "$@" >/dev/null ;;
esac
exec {mps.program} "$@"
""")
        program.chmod(0o755)
        daemons = ControlDaemons(str(base))
        start, limit, remove, end = ({**request, "program": str(program)} for request in requests(mps, protocol))
        pipe = Path(gpu_directory(str(base), mps.gpu)) / (CLIENT if protocol == LEGACY else f"{PIPE}/{SERVER}/a")
        for request in (start, limit):
            daemons.answer(request)
        assert "at most 2048Mi" in str(mps.load("--memory", "3Gi", pipe=pipe).exception)
        daemons.answer({**remove, "namespace": "a"})
        daemons.answer(end)
        assert (list(base.iterdir()), running(mps.node.root)) == ([], [])


def test_a_daemon_that_a_killed_process_was_just_starting_stays_the_only_one() -> None:
    with mps_node(DRIVER_580) as mps:
        program, may_start = mps.program.with_name(f"{mps.program.name}-slow"), mps.pipe.parent / "may-start"
        os.mkfifo(may_start)
        program.write_text(f"""#!/bin/sh
[ ! -p {may_start} ] || read go < {may_start}
exec {mps.program} "$@"
""")
        program.chmod(0o755)
        start, *_, end = ({**request, "program": str(program)} for request in requests(mps, LEGACY))
        base = mps.pipe.parent / "d"
        base.mkdir()
        if (child := os.fork()) == 0:
            ControlDaemons(str(base)).answer(start)
            os._exit(0)
        wait_for(lambda: daemons_of(mps) == 1, 20, "the process starts the daemon")
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        may_start.write_text("go\n")
        may_start.unlink()
        again = ControlDaemons(str(base))
        answer = again.answer(start)
        assert daemons_of(mps) == 1
        assert answer["daemon"]["answers"]
        again.answer(end)
        assert (list(base.iterdir()), running(mps.node.root)) == ([], [])


def test_a_daemon_whose_files_are_gone_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_daemons, "START_TIMEOUT_SECONDS", 1.0)
    with mps_node(DRIVER_580) as mps:
        start, *_, end = requests(mps, LEGACY)
        base = mps.pipe.parent / "d"
        base.mkdir()
        daemons = ControlDaemons(str(base))
        first = daemons.answer(start)["daemon"]["pid"]
        for path in (Path(gpu_directory(str(base), mps.gpu)) / PIPE).iterdir():
            if not path.is_dir():
                path.unlink()
        assert daemons.answer(start)["daemon"]["pid"] not in (0, first)
        assert daemons_of(mps) == 1
        daemons.answer(end)


def test_a_program_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_tool, "RUN_TIMEOUT_SECONDS", 0.2)
    program = tmp_path / control_tool.PROGRAM
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    start = {"request": "start", "gpu": "GPU-1", "program": str(program), "library": "", "protocol": LEGACY}
    with pytest.raises(ControlError, match=r"-d: no answer within 0\.2 s"):
        ControlDaemons(str(tmp_path)).answer(start)
