"""Ray actors that do jobs and return the results in the order of the jobs, for any number of actors.

The actors get the first jobs first, and never more jobs than keep them busy, so the memory that results take is
bounded. A tensor that many jobs contain is put into the object store once. An actor that is lost, alone or with its
node, is replaced, and its jobs are done again: a job depends on nothing but what is sent with it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from torch import Tensor

from fedmll.core.errors import ClientError, ConfigError
from fedmll.core.message import Message, Tensors
from fedmll.data.images.cache import Progress, no_progress
from fedmll.engines import ray_cluster
from fedmll.engines.ray_worker import (
    FAILED,
    PackedTensor,
    RayWorker,
    RemoteJob,
    RemoteReply,
    RunDescription,
    SharedTensor,
    pack,
    pack_tensor,
    unpack,
)
from fedmll.engines.worker_pool import BUNDLE_SECONDS, HELD_RESULTS, LARGEST_BUNDLE, Bundle, Job

SHORT_JOB = 0.25  # seconds: an actor gets a second bundle of such jobs before it has finished the first
MAX_TRIES = 3  # how often a job may lose its actor
POLL_SECONDS = 1.0


@dataclass(eq=False)
class RemoteWorker:
    """An actor. It is ready when it has built the run."""

    actor: Any
    node: str = "a node"
    bundles: int = 0  # that it has not finished
    started: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, kw_only=True)
class ActorResources:
    """What an actor takes from its node."""

    cpus: float = 1.0
    gpus: float = 0.0


_spare: list[tuple[ActorResources, Any]] = []  # actors of finished runs, in a block of `keep_actors`
_keeping = 0


@contextmanager
def keep_actors() -> Iterator[None]:
    """Runs of this process use the actors of earlier runs in this block: a new actor needs seconds to import torch,
    and the data of a comparison stays loaded."""
    global _keeping
    _keeping += 1
    try:
        yield
    finally:
        _keeping -= 1
        while _spare and not _keeping:
            ray_cluster.import_ray().kill(_spare.pop()[1])


class RayPool:
    """A number of actors that all have built one run."""

    def __init__(
        self,
        count: int,
        resources: ActorResources,
        run: RunDescription,
        on_warning: Callable[[str], None],
        progress: Progress = no_progress,
    ) -> None:
        self.ray = ray_cluster.import_ray()
        self.lost = (
            self.ray.exceptions.RayActorError,
            self.ray.exceptions.ObjectLostError,
            self.ray.exceptions.WorkerCrashedError,
            self.ray.exceptions.NodeDiedError,
            self.ray.exceptions.RaySystemError,
        )
        self.count, self.resources, self.description, self.on_warning = count, resources, run, on_warning
        self.workers: list[RemoteWorker] = []
        self.starting: dict[Any, RemoteWorker] = {}  # by the reference that is ready when the worker is
        self.running: dict[Any, tuple[RemoteWorker, Bundle]] = {}
        self.repeated: deque[Bundle] = deque()
        self.kept: dict[int, Tensor] = {}  # shared tensors by their identity
        self.references: dict[int, Any] = {}  # of those that are in the object store
        self.bundle, self.seconds = 1, SHORT_JOB
        self.bytes_moved = 0
        try:
            self._start_all(progress)
        except BaseException:
            self.close()
            raise

    # ---- actors

    def _create(self) -> RemoteWorker:
        for place, (resources, actor) in enumerate(_spare):
            if resources == self.resources:
                del _spare[place]
                return RemoteWorker(actor)
        options = {"num_cpus": self.resources.cpus, "num_gpus": self.resources.gpus, "max_restarts": 0}
        remote = self.ray.remote(RayWorker).options(**options, scheduling_strategy="SPREAD")
        return RemoteWorker(remote.remote())

    def _start_all(self, progress: Progress) -> None:
        """Start all actors, build the run in them and share the features of a frozen backbone."""
        for attempt in range(MAX_TRIES):
            try:
                self._find_actors()
                for done, worker in enumerate(self.workers):
                    progress(done, self.count, "Ray actors load the data")
                    self.get(self.builds[worker])
                share_features(self, progress)
                self.get_all([worker.actor.start.remote() for worker in self.workers])
                return
            except self.lost as error:
                if attempt == MAX_TRIES - 1:
                    raise ClientError(
                        f"Ray actors were lost {MAX_TRIES} times while they loaded the data ({type(error).__name__}). "
                        "Signal 9 usually means that memory ran out: use fewer actors (--workers)."
                    ) from None
                self.on_warning("A Ray actor was lost while it loaded the data; all are started again.")
                for worker in self.workers:
                    self.ray.kill(worker.actor)

    def _find_actors(self) -> None:
        """Actors that answer. Those that the cluster has no room for do not."""
        self.workers = [self._create() for _ in range(self.count)]
        hello = {worker.actor.name_of_node.remote(): worker for worker in self.workers}
        _, waiting = self.ray.wait(list(hello), num_returns=len(hello), timeout=ray_cluster.START_SECONDS)
        if waiting:
            raise ConfigError(
                f"Only {len(hello) - len(waiting)} of {self.count} Ray actors could be started within "
                f"{ray_cluster.START_SECONDS:.0f} seconds: the cluster is in use. Ask for fewer with --workers, or "
                "wait until it is free."
            )
        for reference, worker in hello.items():
            worker.node = self.ray.get(reference)
        self.builds = {worker: worker.actor.build.remote(self.description) for worker in self.workers}

    def get(self, reference: Any) -> Any:
        """The value of a reference. An error that the actor returned is raised."""
        found = self.ray.get(reference)
        if isinstance(found, tuple) and len(found) and isinstance(found[0], str) and found[0] == FAILED:
            _, kind, arguments = found
            raise kind(*arguments)
        return found

    def get_all(self, references: Iterable[Any]) -> list[Any]:
        return [self.get(reference) for reference in list(references)]

    def _lose(self, worker: RemoteWorker, error: BaseException) -> None:
        """Replace a worker. Its replacement may wait until the cluster has room for it."""
        if worker not in self.workers:
            return
        self.workers.remove(worker)
        self.ray.kill(worker.actor)
        rest = f"{len(self.workers)} of {self.count} actors go on"
        self.on_warning(
            f"A Ray actor on {worker.node} was lost ({type(error).__name__}). Its jobs are done again; {rest}, and "
            "another one is started."
        )
        self._start_replacement()

    def _start_replacement(self) -> None:
        worker = self._create()
        worker.actor.build.remote(self.description)
        self.starting[worker.actor.start.remote()] = worker

    def _started(self, reference: Any) -> None:
        worker = self.starting.pop(reference)
        try:
            self.get(reference)
            worker.node = self.ray.get(worker.actor.name_of_node.remote())
        except self.lost:
            self._start_replacement()
            return
        self.workers.append(worker)
        self.on_warning(f"A Ray actor on {worker.node} has joined; there are {len(self.workers)} of {self.count}.")

    # ---- jobs

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Tensors that many of the next jobs contain. Each is put into the object store once, at its first use."""
        self.references.clear()
        self.kept = {id(tensor): tensor for tensor in tensors}

    def run(
        self,
        jobs: Iterable[Job],
        count: int,
        read_states: Callable[[Job], list[Tensors]],
        write_states: Callable[[Job, list[Tensors]], None],
    ) -> Iterator[tuple[Job, list[Message]]]:
        """Each of `count` jobs with its result, in the order of the jobs.

        `read_states` reads the client states of a training job when it is sent, and `write_states` writes them when
        its result is here.
        """
        source = enumerate(jobs)
        results: dict[int, RemoteReply] = {}
        waiting: dict[int, Job] = {}
        given, self.bundle, self.seconds = 0, 1, SHORT_JOB
        self.running.clear()  # of a run that ended with an error: nobody waits for these
        self.repeated.clear()
        for worker in self.workers:
            worker.bundles = 0
        for taken in range(count):
            while taken not in results:
                while (free := self._free_worker()) is not None:
                    if self.repeated:
                        self._give(free, self.repeated.popleft(), read_states)
                        continue
                    size = min(self.bundle, max(1, (count - given) // (2 * len(self.workers))))
                    if given - taken >= HELD_RESULTS * size * len(self.workers):
                        break
                    bundle = list(islice(source, size))
                    if not bundle:
                        break
                    given += len(bundle)
                    waiting |= dict(bundle)
                    self._give(free, bundle, read_states)
                self._wait(results)
            job, reply = waiting.pop(taken), results.pop(taken)
            if job.kind == "train":
                write_states(job, [unpack(state) for state in reply.states])
            yield job, [Message(unpack(tensors), numbers) for tensors, numbers in reply.messages]

    def _free_worker(self) -> RemoteWorker | None:
        """The worker with the fewest bundles, if it may get another one."""
        depth = 2 if self.seconds < SHORT_JOB else 1
        found = min(self.workers, key=lambda worker: worker.bundles, default=None)
        return found if found is not None and found.bundles < depth else None

    def _give(self, worker: RemoteWorker, bundle: Bundle, read_states: Callable[[Job], list[Tensors]]) -> None:
        places: dict[int, int] = {}  # identity of a shared tensor → its place in this call

        def place(tensor: Tensor) -> PackedTensor | SharedTensor:
            if id(tensor) not in self.kept:
                return pack_tensor(tensor)
            if id(tensor) not in self.references:
                self.references[id(tensor)] = self.ray.put(pack_tensor(tensor))
                self.bytes_moved += tensor.nbytes
            return SharedTensor(places.setdefault(id(tensor), len(places)))

        jobs = [
            RemoteJob(
                job.kind,
                job.arguments,
                [({name: place(t) for name, t in m.tensors.items()}, m.numbers) for m in job.messages],
                [pack(state) for state in read_states(job)] if job.kind == "train" else [],
            )
            for _, job in bundle
        ]
        shared = [self.references[identity] for identity in places]
        worker.bundles += 1
        self.running[worker.actor.work.remote(jobs, *shared)] = (worker, bundle)

    def _wait(self, results: dict[int, RemoteReply]) -> None:
        """Wait until results arrive, an actor is lost, or one is ready."""
        if not self.workers:
            self._check_replacements()
        ready, _ = self.ray.wait([*self.running, *self.starting], num_returns=1, timeout=POLL_SECONDS)
        for reference in ready:
            if reference in self.starting:
                self._started(reference)
                continue
            worker, bundle = self.running.pop(reference)
            try:
                seconds, replies = self.get(reference)
            except self.lost as error:
                self._repeat(worker, bundle, error)
                continue
            worker.bundles -= 1
            self.seconds = seconds
            self.bundle = max(1, min(LARGEST_BUNDLE, int(BUNDLE_SECONDS * len(bundle) / max(seconds, 1e-6))))
            for (position, _), reply in zip(bundle, replies, strict=True):
                results[position] = reply

    def _repeat(self, worker: RemoteWorker, bundle: Bundle, error: BaseException) -> None:
        """Do the jobs of a lost actor again, each alone: one of them may be the reason."""
        self._lose(worker, error)
        for position, job in bundle:
            job.tries += 1
            if job.tries >= MAX_TRIES:
                raise ClientError(
                    f"{MAX_TRIES} Ray actors that ran {job.label} were lost, the last one on {worker.node} "
                    f"({type(error).__name__}). Usually memory ran out: use fewer actors (--workers) or smaller "
                    "batches (training.batch_size)."
                )
            self.repeated.append([(position, job)])

    def _check_replacements(self) -> None:
        """All actors are lost: wait for a new one, but not for ever."""
        oldest = min((worker.started for worker in self.starting.values()), default=time.monotonic())
        if time.monotonic() - oldest > ray_cluster.START_SECONDS:
            raise ClientError(
                "All Ray actors were lost, and none could be started again within "
                f"{ray_cluster.START_SECONDS:.0f} seconds. `fedmll resume` continues the run from its last checkpoint."
            )

    def close(self) -> None:
        for worker in [*self.workers, *self.starting.values()]:
            if _keeping and worker in self.workers and not worker.bundles:
                _spare.append((self.resources, worker.actor))
            else:
                self.ray.kill(worker.actor)
        self.workers, self.starting, self.running = [], {}, {}
        self.references.clear()


# ---- the features of a frozen backbone

IN_FLIGHT = 4  # pieces per actor


def share_features(pool: RayPool, progress: Progress = no_progress) -> None:
    """Compute the features that no node has, with all actors, and copy them to the nodes that lack them."""
    number = 0
    while True:
        missing = pool.get_all([worker.actor.missing_features.remote() for worker in pool.workers])
        if number >= len(missing[0]):
            return
        lacking = [worker for worker, lacks in zip(pool.workers, missing, strict=True) if lacks[number]]
        if len(lacking) == len(pool.workers):
            _compute_features(pool, number, progress)
            continue
        if lacking:
            source = next(worker for worker in pool.workers if worker not in lacking)
            _copy_features(pool, number, source, lacking[0])
            continue
        number += 1


def _compute_features(pool: RayPool, number: int, progress: Progress) -> None:
    """All actors compute; the first one writes the file of its node, and the means of the tokens if those are used."""
    writer = pool.workers[0].actor
    pieces = pool.get(writer.feature_pieces.remote(number))
    pool.get(writer.open_tokens.remote(number))
    written = deque[Any]()
    for done, piece in enumerate(pieces):
        worker = pool.workers[done % len(pool.workers)].actor
        written.append(writer.write_piece.remote(piece, worker.compute_tokens.remote(number, piece)))
        if len(written) >= IN_FLIGHT * len(pool.workers):
            pool.get(written.popleft())
            progress(done, len(pieces), "Ray actors compute features")
    pool.get_all(written)
    pool.get(writer.finish_features.remote())
    pool.get(writer.stored_shape.remote(number))


def _copy_features(pool: RayPool, number: int, source: RemoteWorker, target: RemoteWorker) -> None:
    shape = pool.get(source.actor.stored_shape.remote(number))
    pool.get(target.actor.open_copy.remote(number, shape))
    written = deque[Any]()
    for piece in pool.get(source.actor.feature_pieces.remote(number)):
        written.append(target.actor.write_piece.remote(piece, source.actor.read_piece.remote(number, piece)))
        if len(written) >= IN_FLIGHT:
            pool.get(written.popleft())
    pool.get_all(written)
    pool.get(target.actor.finish_features.remote())
