"""Worker processes that do jobs and return the results in the order of the jobs, for any number of workers.

The tensors of jobs and results are passed through shared memory; only small headers are sent through pipes. Short jobs
are sent in bundles, because waking a process costs as much as the round of a small client. A worker that dies is
replaced and its job is tried once more. If that fails too, the error has the label of the job.
"""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from ctypes import c_int64
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

import torch
from torch import Tensor

from fedmll.core.errors import ClientError
from fedmll.core.message import Message, Tensors
from fedmll.core.processes import fork_process, portable_error

HELD_RESULTS = 4  # bundles per worker that may wait for the slowest job; it bounds the memory that results take
BUNDLE_SECONDS, LARGEST_BUNDLE = 0.02, 16  # a bundle takes about this long and has at most this many jobs
ALIGNMENT = 64  # bytes, of a tensor in shared memory


class Entry(NamedTuple):
    """Where a tensor lies in an arena."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


class Arena:
    """Shared memory that grows: the parent and its forked workers map the same unnamed file.

    Nothing is left behind, however a process ends.
    """

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("fedmll")
        else:
            with tempfile.TemporaryFile() as file:
                self.descriptor = os.dup(file.fileno())
        self.memory: mmap.mmap | None = None
        self.used = 0

    def clear(self) -> None:
        self.used = 0

    def write(self, tensor: Tensor) -> Entry:
        entry = Entry(tensor.dtype, tuple(tensor.shape), self.used)
        self.used += -(-max(tensor.numel() * tensor.element_size(), 1) // ALIGNMENT) * ALIGNMENT
        size = os.fstat(self.descriptor).st_size
        if self.used > size:
            os.ftruncate(self.descriptor, max(self.used, size + size // 2))
        self.view(entry).copy_(tensor)
        return entry

    def write_all(self, tensors: Tensors) -> dict[str, Entry]:
        return {name: self.write(tensor) for name, tensor in tensors.items()}

    def read_all(self, entries: dict[str, Entry]) -> Tensors:
        """Copies: the arena may be written again at once."""
        return {name: self.view(entry).clone() for name, entry in entries.items()}

    def view(self, entry: Entry) -> Tensor:
        count = torch.Size(entry.shape).numel()
        if count == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        end = entry.offset + count * entry.dtype.itemsize
        if self.memory is None or len(self.memory) < end:
            # an older map lives on while tensors still look at it
            self.memory = mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size)
        return torch.frombuffer(self.memory, dtype=entry.dtype, count=count, offset=entry.offset).view(entry.shape)

    def close(self) -> None:
        os.close(self.descriptor)


@dataclass
class Job:
    kind: str
    arguments: tuple
    messages: list[Message]  # one per client (training.clients_per_batch); the result has as many
    label: str  # for errors: "client c003 in round 12"
    tries: int = field(default=0, compare=False)


JobFunction = Callable[[Job], list[Message]]
Bundle = list[tuple[int, Job]]  # jobs with their places
Header = dict[str, tuple[bool, Entry]]  # of each tensor: whether it is shared, and where it lies


class Worker:
    """One process with its pipe and its two arenas."""

    def __init__(self, do_job: JobFunction, shared: Arena) -> None:
        self.inbox, self.outbox = Arena(), Arena()
        ours, theirs = multiprocessing.Pipe()
        self.at = multiprocessing.RawValue(c_int64)  # the job of its bundle that it is doing: known also if it dies
        self.process = fork_process(_serve, theirs, ours, do_job, self.inbox, self.outbox, shared, self.at)
        theirs.close()
        self.pipe: Connection = ours
        self.busy: Bundle = []

    def stop(self) -> None:
        self.pipe.close()
        self.process.terminate()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.inbox.close()
        self.outbox.close()


class WorkerPool:
    """A fixed number of worker processes."""

    def __init__(self, do_job: JobFunction, workers: int) -> None:
        self.do_job = do_job
        self.shared = Arena()
        self.entries: dict[int, Entry] = {}  # by the identity of a tensor: its place in the shared arena
        self.kept: list[Tensor] = []  # keeps them alive, so that no other tensor gets the same identity
        # otherwise every forked process would write the buffered output again
        sys.stdout.flush()
        sys.stderr.flush()
        self.workers = [Worker(do_job, self.shared) for _ in range(workers)]
        self.bundle = 1  # jobs per bundle, from the time that the last ones took

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Tensors that many of the next jobs contain. Each is written to shared memory once, at its first use."""
        self.shared.clear()
        self.entries.clear()
        self.kept = list(tensors)

    def run(self, jobs: Iterable[Job], count: int) -> Iterator[tuple[Job, list[Message]]]:
        """Each of `count` jobs with its result, in the order of the jobs."""
        source = enumerate(jobs)
        results: dict[int, tuple[Job, list[Message]]] = {}
        given, self.bundle = 0, 1
        try:
            for taken in range(count):
                for worker in self.workers:
                    fair = max(
                        1, (count - given) // (2 * len(self.workers))
                    )  # so that the last jobs end at about the same time
                    size = min(self.bundle, fair)
                    if not worker.busy and given - taken < HELD_RESULTS * size * len(self.workers):
                        bundle = list(islice(source, size))
                        given += len(bundle)
                        if bundle:
                            self._give(worker, bundle)
                while taken not in results:
                    self._wait(results)
                yield results.pop(taken)
        finally:
            # after an error or Ctrl-C: workers that are still busy must not write into the next run
            for i, worker in enumerate(self.workers):
                if worker.busy:
                    worker.stop()
                    self.workers[i] = Worker(self.do_job, self.shared)

    def _give(self, worker: Worker, bundle: Bundle) -> None:
        worker.inbox.clear()
        worker.busy = bundle
        headers = [[(self._header(worker, m), m.numbers) for m in job.messages] for _, job in bundle]
        worker.pipe.send([(job.kind, job.arguments, of) for (_, job), of in zip(bundle, headers, strict=True)])

    def _header(self, worker: Worker, message: Message) -> Header:
        """Where the tensors of the message are. Those that are not shared are written to the worker's inbox."""
        header: Header = {}
        for name, tensor in message.tensors.items():
            if any(tensor is shared for shared in self.kept):
                if id(tensor) not in self.entries:
                    self.entries[id(tensor)] = self.shared.write(tensor)
                header[name] = (True, self.entries[id(tensor)])
            else:
                header[name] = (False, worker.inbox.write(tensor))
        return header

    def _wait(self, results: dict[int, tuple[Job, list[Message]]]) -> None:
        """Wait until a worker returns results, reports an error or dies."""
        busy = {worker.pipe: worker for worker in self.workers if worker.busy}
        for pipe in wait(list(busy)):
            worker = busy[pipe]  # type: ignore[index]
            try:
                status, *answer = worker.pipe.recv()
            except (EOFError, ConnectionResetError):
                self._replace(worker)
                continue
            bundle, worker.busy = worker.busy, []
            if status == "error":
                error, arguments = answer
                raise error(*arguments)
            seconds, done = answer
            self.bundle = max(1, min(LARGEST_BUNDLE, int(BUNDLE_SECONDS * len(bundle) / max(seconds, 1e-6))))
            for (place, job), replies in zip(bundle, done, strict=True):
                results[place] = (job, [Message(worker.outbox.read_all(e), numbers) for e, numbers in replies])

    def _replace(self, dead: Worker) -> None:
        bundle = dead.busy
        job = bundle[dead.at.value][1]
        dead.process.join(5)
        code = dead.process.exitcode
        cause = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
        dead.stop()
        worker = Worker(self.do_job, self.shared)
        self.workers[self.workers.index(dead)] = worker
        job.tries += 1
        if job.tries > 1:
            raise ClientError(
                f"The worker that ran {job.label} {cause}, and so did the one that tried it again. Signal 9 usually "
                "means that memory ran out: use fewer workers (--workers) or smaller batches (training.batch_size)."
            )
        self._give(worker, bundle)

    def close(self) -> None:
        for worker in self.workers:
            worker.stop()
        self.shared.close()


def _serve(
    pipe: Connection,
    parents_end: Connection,
    do_job: JobFunction,
    inbox: Arena,
    outbox: Arena,
    shared: Arena,
    at: c_int64,
) -> None:
    """The main function of a worker: one torch thread, bundles of jobs until the pipe is closed."""
    parents_end.close()
    torch.set_num_threads(1)
    gc.freeze()  # the garbage collector skips the objects inherited from the parent
    while True:
        at.value = 0
        try:
            jobs = pipe.recv()
        except (EOFError, OSError):
            return
        begin, done = time.process_time(), []
        outbox.clear()
        try:
            for at.value, (kind, arguments, headers) in enumerate(jobs):
                messages = [
                    Message(
                        {name: (shared if common else inbox).view(e) for name, (common, e) in header.items()}, numbers
                    )
                    for header, numbers in headers
                ]
                replies = do_job(Job(kind, arguments, messages, label=""))
                done.append([(outbox.write_all(reply.tensors), reply.numbers) for reply in replies])
            pipe.send(("done", time.process_time() - begin, done))
        except Exception as error:
            pipe.send(("error", *portable_error(error, "in a worker process")))
