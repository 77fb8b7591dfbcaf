"""A process that ends, whatever its threads are just doing."""

from __future__ import annotations

import subprocess
import sys

LATE_START = """
import logging, threading, time
from driver.process_exit import leave

go, begun, start = threading.Event(), threading.Event(), threading._start_new_thread

def late(*arguments):
    begun.set()
    time.sleep(0.2)
    return start(*arguments)

def begin():
    go.wait()
    threading.Thread(target=print, args=("worked",), daemon=False).start()

threading.Thread(target=begin, daemon=True).start()
threading._start_new_thread = late
go.set()
begun.wait()
leave(logging.getLogger())
print("left")
"""


def test_a_thread_that_is_just_being_started_is_waited_for_as_any_other() -> None:
    ended = subprocess.run([sys.executable, "-c", LATE_START], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout.split(), ended.stderr) == (0, ["worked", "left"], "")


HANGING = """
import logging, threading
from driver import process_exit

process_exit.EXIT_TIMEOUT_SECONDS = 0.1
threading.Thread(target=threading.Event().wait, name="nvml").start()
process_exit.leave(logging.getLogger())
print("left")
"""


def test_a_thread_that_hangs_is_named_and_left_behind() -> None:
    ended = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, "")
    assert "exiting although threads do not end" in ended.stderr
