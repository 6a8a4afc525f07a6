"""Several runs of a comparison at a time, each in its own process. Their callbacks are called here, through pipes.

The processes end with this one, however it ends. A run that is stopped is like a run that is killed: its folder is
valid, and it continues from its last checkpoint.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_pipes
from multiprocessing.process import BaseProcess

import torch

from fedmll.comparison.results import ComparisonCell
from fedmll.config.experiment import Experiment
from fedmll.core.errors import FedmllError
from fedmll.core.processes import fork_process, portable_error
from fedmll.data.federation import Federation
from fedmll.training.callbacks import Callback, Result

Train = Callable[[ComparisonCell, Federation, Callback], None]
FORWARDED_HOOKS = ("on_setup_progress", "on_client_end", "on_round_end", "on_note", "on_warning")
ENDED = "ended"


class RunKilled(FedmllError):
    """The process of a run has ended without a result."""


@dataclass
class _ParallelRun:
    cell: ComparisonCell
    data: Federation
    callback: Callback
    process: BaseProcess
    pipe: Connection


class ParallelRuns:
    """At most `max_runs` runs at a time; `train` is called in the process of each."""

    def __init__(self, max_runs: int, train: Train) -> None:
        self.max_runs, self.train, self.runs = max_runs, train, list[_ParallelRun]()

    @property
    def has_room(self) -> bool:
        return len(self.runs) < self.max_runs

    def start(self, cell: ComparisonCell, data: Federation, callback: Callback) -> None:
        sys.stdout.flush()  # the fork would write buffered text a second time
        sys.stderr.flush()
        ours, theirs = multiprocessing.Pipe()
        process = fork_process(_train_in_process, theirs, ours, self.train, cell, data, may_fork=True)
        theirs.close()
        self.runs.append(_ParallelRun(cell, data, callback, process, ours))

    def wait(self) -> Iterator[tuple[ComparisonCell, Callback, FedmllError | None]]:
        """Wait for events and call the callbacks. Yields each run that has ended, with its error if it had one."""
        pipes = {entry.pipe: entry for entry in self.runs}
        for pipe in wait_for_pipes(list(pipes)):
            entry = pipes[pipe]  # type: ignore[index]
            try:
                event, arguments = entry.pipe.recv()
            except (EOFError, ConnectionResetError):
                self._close(entry)
                yield entry.cell, entry.callback, RunKilled(_describe_exit(entry.process))
                continue
            if event == "on_run_start":
                experiment, first_round = arguments
                entry.callback.on_run_start(experiment, entry.data, first_round)
                continue
            if event != ENDED:
                getattr(entry.callback, event)(*arguments)
                continue
            self._close(entry)
            error = None if arguments is None else arguments[0](*arguments[1])
            if error is not None and not isinstance(error, FedmllError):
                raise error
            yield entry.cell, entry.callback, error

    def stop(self) -> None:
        """End all runs that are still going; nothing that is on disk is lost."""
        for entry in self.runs:
            entry.process.kill()
        for entry in list(self.runs):
            self._close(entry)

    def _close(self, entry: _ParallelRun) -> None:
        self.runs.remove(entry)
        entry.process.join()
        entry.pipe.close()


def _describe_exit(process: BaseProcess) -> str:
    code = process.exitcode or 0
    cause = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    return (
        f"The process of this run {cause}. Signal 9 usually means that memory ran out: use fewer --jobs. The same "
        "command continues the run."
    )


class _PipeCallback(Callback):
    """Sends the calls of hooks through a pipe."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

        def send(hook: str) -> Callable[..., None]:
            return lambda *arguments: pipe.send((hook, arguments))

        for hook in FORWARDED_HOOKS:
            setattr(self, hook, send(hook))

    def on_run_start(self, experiment: Experiment, federation: Federation, first_round: int) -> None:
        self.pipe.send(("on_run_start", (experiment, first_round)))

    def on_run_end(self, result: Result) -> None:
        """Nothing is sent: the summary is in the run's folder."""


def _train_in_process(
    pipe: Connection, parents_end: Connection, train: Train, cell: ComparisonCell, data: Federation
) -> None:
    parents_end.close()
    torch.set_num_threads(1)
    failure = None
    try:
        train(cell, data, _PipeCallback(pipe))
    except Exception as error:
        failure = portable_error(error, "in the process of a run")
    pipe.send((ENDED, failure))
