"""Several runs of a comparison at a time, a process each. What they tell comes through pipes to their observers here.

The processes end with this one, however it ends. A run that is stopped in its middle is what a killed run is: its
folder is whole, and it goes on from its last checkpoint.
"""

from __future__ import annotations

import multiprocessing
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from fedmll.data.federation import Federation
from fedmll.errors import FedmllError
from fedmll.experiment import Experiment
from fedmll.processes import forked
from fedmll.running.comparison import Cell
from fedmll.running.observers import Observer, Result

Train = Callable[[Cell, Federation, Observer], None]

TOLD = ("preparing", "client_done", "round_done", "note", "warning")  # as they are
OVER = "over"


class RunKilled(FedmllError):
    """The process of a run is gone, and nobody here ended it."""


@dataclass
class _Job:
    cell: Cell
    data: Federation
    observer: Observer
    process: BaseProcess
    pipe: Connection


class Jobs:
    def __init__(self, most: int, train: Train) -> None:
        self.most, self.train, self.jobs = most, train, list[_Job]()

    @property
    def free(self) -> bool:
        return len(self.jobs) < self.most

    def start(self, cell: Cell, data: Federation, observer: Observer) -> None:
        sys.stdout.flush()  # what is not written yet would be written again by the fork
        sys.stderr.flush()
        ours, theirs = multiprocessing.Pipe()
        process = forked(_work, theirs, ours, self.train, cell, data, workers=True)
        theirs.close()
        self.jobs.append(_Job(cell, data, observer, process, ours))

    def ended(self) -> Iterator[tuple[Cell, Observer, FedmllError | None]]:
        """Wait, tell the observers, and give each run that ended in the meantime, with its error if it had one."""
        pipes = {job.pipe: job for job in self.jobs}
        for pipe in wait(list(pipes)):
            job = pipes[pipe]  # type: ignore[index]
            try:
                event, arguments = job.pipe.recv()
            except (EOFError, ConnectionResetError):
                self._close(job)
                yield job.cell, job.observer, RunKilled(_how(job.process))
                continue
            if event != OVER:
                _tell(job, event, arguments)
                continue
            self._close(job)
            kind, text = arguments
            if kind is not None and not issubclass(kind, FedmllError):
                raise kind(text)
            yield job.cell, job.observer, None if kind is None else kind(text)

    def _close(self, job: _Job) -> None:
        self.jobs.remove(job)
        job.process.join()
        job.pipe.close()

    def stop(self) -> None:
        """End those that still run; nothing that is on disk is lost."""
        for job in self.jobs:
            job.process.kill()
        for job in list(self.jobs):
            self._close(job)


def _how(process: BaseProcess) -> str:
    code = process.exitcode or 0
    cause = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    return (
        f"The process of this run {cause}. Signal 9 usually means that memory ran out: use fewer --jobs. The same "
        "command goes on with it."
    )


def _tell(job: _Job, event: str, arguments: tuple[Any, ...]) -> None:
    if event == "started":
        job.observer.started(arguments[0], job.data, arguments[1])
    else:
        getattr(job.observer, event)(*arguments)


class _Teller(Observer):
    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

        def telling(event: str) -> Callable[..., None]:
            return lambda *arguments: pipe.send((event, arguments))

        for event in TOLD:
            setattr(self, event, telling(event))

    def started(self, experiment: Experiment, federation: Federation, first_round: int) -> None:
        self.pipe.send(("started", (experiment, first_round)))

    def finished(self, result: Result) -> None:
        """The summary is in the run's folder."""


def _work(pipe: Connection, parents_end: Connection, train: Train, cell: Cell, data: Federation) -> None:
    parents_end.close()
    torch.set_num_threads(1)
    kind: type[BaseException] | None = None
    text = ""
    try:
        train(cell, data, _Teller(pipe))
    except FedmllError as error:
        kind, text = type(error), str(error)
    except Exception:  # a programming error: its traceback must reach the person
        kind, text = RuntimeError, f"in the process of a run:\n{traceback.format_exc()}"
    pipe.send((OVER, (kind, text)))
