"""Worker processes that do jobs and give the results back in the jobs' order, whatever the number of workers.

A job's tensors and its result's go through shared memory; only small headers go through the pipes. A worker that dies
is replaced and its job tried once more; a second death is reported with the job's label.
"""

from __future__ import annotations

import multiprocessing
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

import torch
from torch import Tensor

from fedmll.engines.shared import Arena, Entry, read_all, write_all
from fedmll.errors import ClientError, FedmllError
from fedmll.message import Message
from fedmll.processes import forked

HELD_RESULTS = 4  # a worker: how far one may run ahead of the slowest job, and so what memory results can take


@dataclass
class Job:
    kind: str
    arguments: tuple
    message: Message
    label: str  # for errors: "client c003 in round 12"
    tries: int = field(default=0, compare=False)


Work = Callable[[str, tuple, Message], Message]


class Worker:
    """One process, its two pipes' ends and its two arenas."""

    def __init__(self, work: Work, shared: Arena) -> None:
        self.inbox, self.outbox = Arena(), Arena()
        ours, theirs = multiprocessing.Pipe()
        self.process = forked(_serve, theirs, ours, work, self.inbox, self.outbox, shared)
        theirs.close()
        self.pipe: Connection = ours
        self.busy: tuple[int, Job] | None = None

    def stop(self) -> None:
        self.pipe.close()
        self.process.terminate()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.inbox.close()
        self.outbox.close()


class Pool:
    def __init__(self, work: Work, workers: int) -> None:
        self.work = work
        self.shared = Arena()
        self.entries: dict[int, Entry] = {}  # by the tensor's identity: what lies in the shared arena
        self.kept: list[Tensor] = []  # so that an identity is not given to another tensor meanwhile
        # a clean log: output that is not written yet would be written again by every fork
        sys.stdout.flush()
        sys.stderr.flush()
        self.workers = [Worker(work, self.shared) for _ in range(workers)]

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Tensors that many of the next jobs carry: written once, at their first use."""
        self.shared.clear()
        self.entries.clear()
        self.kept = list(tensors)

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Message]]:
        """Each job with its result, in the order of the jobs."""
        source = enumerate(jobs)
        results: dict[int, tuple[Job, Message]] = {}
        given = taken = 0
        exhausted = False
        try:
            while True:
                for worker in self.workers:
                    if worker.busy is None and not exhausted and given - taken < HELD_RESULTS * len(self.workers):
                        place, job = next(source, (-1, None))
                        exhausted = job is None
                        if job is not None:
                            self._give(worker, place, job)
                            given += 1
                if exhausted and taken == given:
                    return
                while taken not in results:
                    self._wait(results)
                yield results.pop(taken)
                taken += 1
        finally:
            # an abandoned run (an error, Ctrl-C): whoever is still at work must not write into the next one
            for i, worker in enumerate(self.workers):
                if worker.busy is not None:
                    worker.stop()
                    self.workers[i] = Worker(self.work, self.shared)

    def _give(self, worker: Worker, place: int, job: Job) -> None:
        worker.inbox.clear()
        header: dict[str, tuple[bool, Entry]] = {}
        for name, tensor in job.message.tensors.items():
            if any(tensor is shared for shared in self.kept):
                if id(tensor) not in self.entries:
                    self.entries[id(tensor)] = self.shared.write(tensor)
                header[name] = (True, self.entries[id(tensor)])
            else:
                header[name] = (False, worker.inbox.write(tensor))
        worker.busy = (place, job)
        worker.pipe.send((job.kind, job.arguments, header, job.message.numbers))

    def _wait(self, results: dict[int, tuple[Job, Message]]) -> None:
        """Until something happened: a result, an error or a death."""
        busy = {worker.pipe: worker for worker in self.workers if worker.busy is not None}
        for pipe in wait(list(busy)):
            worker = busy[pipe]  # type: ignore[index]
            assert worker.busy is not None
            place, job = worker.busy
            try:
                status, *answer = worker.pipe.recv()
            except (EOFError, ConnectionResetError):
                self._replace(worker)
                continue
            worker.busy = None
            if status == "error":
                error, text = answer
                raise error(text)
            entries, numbers = answer
            results[place] = (job, Message(read_all(worker.outbox, entries), numbers))

    def _replace(self, dead: Worker) -> None:
        assert dead.busy is not None
        place, job = dead.busy
        dead.process.join(5)
        code = dead.process.exitcode
        cause = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
        dead.stop()
        worker = Worker(self.work, self.shared)
        self.workers[self.workers.index(dead)] = worker
        job.tries += 1
        if job.tries > 1:
            raise ClientError(
                f"The worker that ran {job.label} {cause}, and so did the one that tried it again. Signal 9 usually "
                "means that memory ran out: use fewer workers (--workers) or smaller batches (training.batch_size)."
            )
        self._give(worker, place, job)

    def close(self) -> None:
        for worker in self.workers:
            worker.stop()
        self.shared.close()


def _serve(pipe: Connection, parents_end: Connection, work: Work, inbox: Arena, outbox: Arena, shared: Arena) -> None:
    """A worker's life: one torch thread, jobs until the pipe closes."""
    parents_end.close()
    torch.set_num_threads(1)
    while True:
        try:
            kind, arguments, header, numbers = pipe.recv()
        except (EOFError, OSError):
            return
        tensors = {name: (shared if common else inbox).view(entry) for name, (common, entry) in header.items()}
        try:
            reply = work(kind, arguments, Message(tensors, numbers))
            pipe.send(("done", write_all(outbox, reply.tensors), reply.numbers))
        except FedmllError as error:
            pipe.send(("error", type(error), str(error)))
        except Exception:
            # a programming error: its traceback must reach the person, from whichever process
            pipe.send(("error", RuntimeError, f"in a worker process:\n{traceback.format_exc()}"))
