"""The local engine: a federation on one machine.

It has W worker processes, each with one torch thread and one model object. The largest clients are trained first.
Replies are returned in an order that does not depend on W. With `workers = 0` the calling process trains.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from fedmll.core.message import Message, Tensors
from fedmll.data.federation import Federation
from fedmll.data.images.cache import Progress, no_progress
from fedmll.engines.devices import choose_local_device
from fedmll.engines.simulation import SimulationEngine
from fedmll.engines.worker_pool import Job, WorkerPool


class LocalEngine(SimulationEngine):
    """Trains all clients on this machine."""

    def __init__(self, federation: Federation, client_state_folder: Path, progress: Progress = no_progress) -> None:
        setting = federation.experiment.engine
        super().__init__(federation, client_state_folder, choose_local_device(setting), progress)
        workers = setting.workers
        if workers == "auto":
            workers = 0 if self.device.type != "cpu" else len(os.sched_getaffinity(0))
        self.threads = torch.get_num_threads()
        if not workers and self.device.type == "cpu":
            torch.set_num_threads(1)  # as in a worker: sums over several threads have other last bits
        self.pool = WorkerPool(self._do_job, workers) if workers else None

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
        torch.set_num_threads(self.threads)

    def run_jobs(self, jobs: Iterator[Job], count: int, shared: Tensors) -> Iterator[tuple[Job, list[Message]]]:
        if self.pool is not None:
            self.pool.share(shared.values())
            yield from self.pool.run(jobs, count)
            return
        for job in jobs:
            yield job, self._do_job(job)

    def _do_job(self, job: Job) -> list[Message]:
        """In a worker. Client states are files, which worker and parent share."""
        if job.kind == "predict":
            return [self.runner.predict(job.messages[0], *job.arguments)]
        clients, number, _ = job.arguments
        states = self.read_client_states(job)
        replies = self.runner.train(job.messages, states, clients, number)
        self.write_client_states(job, states)
        return replies
