"""Worker processes and Ctrl-C at any moment, also before they have their signal handlers."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal
from fedmll.core.processes import fork_process

def interrupt(*_):
    raise KeyboardInterrupt

def work():
    print("worked", flush=True)

signal.signal(signal.SIGTERM, interrupt)
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.{name}))
process = fork_process(work)
process.join()
print("code", process.exitcode, flush=True)
os.kill(os.getpid(), signal.{name})  # the parent still hears it
"""


ARRAYS = """
from pathlib import Path
import torch
from fedmll.core.processes import fork_process

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

def work():
    before = resident()
    arrays = [torch.ones(2**22) for _ in range(4)]  # 16 MB each
    arrays.clear()
    print((resident() - before) >> 20, flush=True)

fork_process(work).join()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator of the GNU C library is set")
def test_worker_keeps_freed_memory_of_large_arrays() -> None:
    """It would be cleared anew for the next ones, page by page."""
    done = subprocess.run([sys.executable, "-c", ARRAYS], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 56


@pytest.mark.parametrize(("name", "printed"), [("SIGINT", ["worked", "code 0"]), ("SIGTERM", ["code -15"])])
def test_signal_before_a_worker_has_its_handlers(name: str, printed: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(name=name)], capture_output=True, text=True)
    assert done.stdout.splitlines() == printed
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")
