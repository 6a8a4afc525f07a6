"""Forked worker processes, the number of threads, and errors of memory.

Workers ignore Ctrl-C, stop when they are told to, and end when their parent ends.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

from fedmll.core.errors import FedmllError

STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM}
POLL_SECONDS = 0.2


def fork_process(target: Callable[..., None], *arguments: Any, may_fork: bool = False) -> BaseProcess:
    """Start a forked process that runs `target(*arguments)`; it inherits data and models without a copy.

    With `may_fork` it may start processes of its own (it is not a daemon process).
    """
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_run, args=(os.getpid(), target, arguments), daemon=not may_fork)
    # A signal that reached the child before it has its own handlers would print the parent's traceback: block it.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    return process


def _run(parent: int, target: Callable[..., None], arguments: tuple) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    end_with_parent(parent)
    _keep_freed_memory()
    target(*arguments)


def end_with_parent(parent: int, *, watch: bool = False) -> None:
    """End this process when its parent ends, also when the parent is killed.

    Args:
        parent: the parent's process id.
        watch: let a thread look for the parent. Otherwise Linux sends a signal when the *thread* that started this
            process ends; on other systems the worker notices its closed pipe.
    """
    if watch:
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()
        return
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def _keep_freed_memory() -> None:
    """Let the C library of Linux keep freed memory.

    By default it returns the memory of a large array to the system and clears the next one page by page, in every layer
    of every step: an eighth of a small network's time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3
        mallopt(mmap_threshold, 32 * 2**20)  # the largest value that it accepts
        mallopt(trim_threshold, 2**30)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, NumPy or torch could not allocate memory."""
    texts = ("can't allocate memory", "not enough memory", "out of memory", "Storage size calculation overflowed")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
    )


def portable_error(error: Exception, where: str) -> tuple[type[Exception], tuple[Any, ...]]:
    """The type and the arguments of an error in another process, which raises it again: `kind(*arguments)`.

    Errors that a person can correct, errors of files and of memory stay what they are. Every other error is a bug: the
    RuntimeError has its traceback.
    """
    if isinstance(error, FedmllError):
        return type(error), (str(error),)
    if isinstance(error, OSError):
        return OSError, (error.errno, error.strerror, error.filename)
    if is_out_of_memory(error):
        return MemoryError, (str(error),)
    return RuntimeError, (f"{where}:\n{''.join(traceback.format_exception(error))}",)


@contextmanager
def single_thread() -> Iterator[None]:
    """Use one torch thread, for small computations in the server's process.

    The cores belong to the clients' workers: threads that wait for a busy core made such computations ten times
    slower. The result is also the same for any number of cores.
    """
    import torch  # here: processes that need no torch start faster

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
