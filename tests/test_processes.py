"""Workers meet Ctrl-C at any moment, also before they are ready for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, signal
from fedmll.processes import forked

def interrupt(*_):
    raise KeyboardInterrupt

def work():
    print("worked", flush=True)

signal.signal(signal.SIGTERM, interrupt)
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.{name}))
process = forked(work)
process.join()
print("code", process.exitcode, flush=True)
os.kill(os.getpid(), signal.{name})  # the parent still hears it
"""


@pytest.mark.parametrize(("name", "printed"), [("SIGINT", ["worked", "code 0"]), ("SIGTERM", ["code -15"])])
def test_a_signal_that_meets_a_worker_before_it_begins(name: str, printed: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(name=name)], capture_output=True, text=True)
    assert done.stdout.splitlines() == printed
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")
