"""Forked workers that stop when they are told to, end with their parent and say nothing of a Ctrl-C."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

STOPPING = {signal.SIGINT, signal.SIGTERM}


def forked(target: Callable[..., None], *arguments: Any, workers: bool = False) -> BaseProcess:
    """A process that runs target; data and models are inherited, not copied. Ctrl-C is the parent's to handle.
    `workers`: it may fork some of its own."""
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_run, args=(os.getpid(), target, arguments), daemon=not workers)
    # a signal that meets the child before it has its own handlers would print the parent's traceback: it waits
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    return process


def _run(parent: int, target: Callable[..., None], arguments: tuple) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    _die_with(parent)
    _keep_memory()
    target(*arguments)


def _die_with(parent: int) -> None:
    """However the parent ends (SIGKILL too), its workers end with it. Linux; elsewhere the closed pipe tells them."""
    if sys.platform == "linux":
        death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _keep_memory() -> None:
    """The C library of Linux gives a large array's memory back when it is freed, and has the next one cleared, page by
    page: for every layer of every step, an eighth of a small network's time. A worker keeps what it has had."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3
        mallopt(mmap_threshold, 32 * 2**20)  # the most that it takes
        mallopt(trim_threshold, 2**30)
