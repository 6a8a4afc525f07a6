"""Jobs in worker processes: short jobs are bundled, which changes nothing else."""

import os
import signal
from pathlib import Path

import pytest
import torch

from fedmll.core.errors import ClientError
from fedmll.core.message import Message
from fedmll.engines.worker_pool import LARGEST_BUNDLE, Job, WorkerPool

COUNT = 70
ALWAYS = "always"  # no file


def work(job: Job) -> list[Message]:
    """Returns twice what was sent. If its kind is the path of a file that does not exist, creates it and dies."""
    kind, messages = job.kind, job.messages
    if kind and not Path(kind).exists():
        if kind != ALWAYS:
            Path(kind).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return [Message({"twice": 2 * m["x"] + m["shared"]}, {"pid": float(os.getpid())} | m.numbers) for m in messages]


def results(pool: WorkerPool, deadly: dict[int, str]) -> list[Message]:
    shared = torch.tensor([0.5])
    pool.share([shared])
    jobs = (
        Job(
            deadly.get(number, ""),
            (),
            [Message({"x": torch.full((3,), float(number)), "shared": shared})],
            f"job {number}",
        )
        for number in range(COUNT)
    )
    return [reply for _, (reply,) in pool.run(jobs, COUNT)]


@pytest.mark.parametrize("workers", [1, 2])
def test_short_jobs_are_bundled_and_results_are_in_order(workers: int, tmp_path: Path) -> None:
    pool = WorkerPool(work, workers)
    try:
        for deadly in ({}, {50: str(tmp_path / "died")}):  # one that dies once changes nothing
            found = results(pool, deadly)
            assert [reply["twice"].tolist() for reply in found] == [[2 * n + 0.5] * 3 for n in range(COUNT)]
            assert 1 < pool.bundle <= LARGEST_BUNDLE
        assert len({reply.numbers["pid"] for reply in found}) == workers + 1
    finally:
        pool.close()


def test_job_with_several_messages_has_a_result_for_each() -> None:
    """With own and shared tensors, and with numbers."""
    shared = torch.tensor([0.5])
    pool = WorkerPool(work, 2)
    sent = [[Message({"x": torch.full((n,), float(n)), "shared": shared}, {"n": float(n)}) for n in range(size)]
            for size in (3, 1, 12)]  # fmt: skip
    try:
        pool.share([shared])
        found = list(pool.run((Job("", (), messages, "a job") for messages in sent), 3))
    finally:
        pool.close()
    for messages, (job, replies) in zip(sent, found, strict=True):
        assert job.messages is messages and len(replies) == len(messages)
        for n, reply in enumerate(replies):
            assert reply["twice"].tolist() == [2 * n + 0.5] * n and reply.numbers["n"] == n


def test_error_names_the_job_of_a_dead_worker() -> None:
    pool = WorkerPool(work, 1)
    try:
        with pytest.raises(ClientError, match=r"^The worker that ran job 60 was killed by signal 9"):
            results(pool, {60: ALWAYS})
    finally:
        pool.close()
