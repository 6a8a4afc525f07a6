"""How much memory an experiment would take here, found out before this process takes any of it.

The network is built, and sees two images, in a process of its own that may not grow beyond the limit: whatever sizes a
server asks for, the worst is that this process ends."""

from __future__ import annotations

import math
import multiprocessing
import os
import resource
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor, nn

from fedmll.deploy.sentences import Refused
from fedmll.errors import FedmllError
from fedmll.methods import make
from fedmll.task import Task

SECONDS = 120  # for a network that is built and sees two images
TRIED = 2  # images
PIXEL_BYTES = 4
WEIGHT_COPIES = 6  # the weights, their gradients, two moments of the optimiser, what was received, the reply
GIGABYTE = 1e9


def bytes_needed(task: Task, images: int, most: float) -> float:
    """Of the model and a batch. More than `most` bytes, or what cannot be built within them, is refused."""
    batch = min(task.experiment.training.batch_size, images)
    pixels = 2.0 * batch * math.prod(task.sample_shape) * PIXEL_BYTES  # as they are, and as the network takes them
    if pixels > most:
        raise _too_much(task, batch, most, f"more than {most / GIGABYTE:g} GB")
    kind, _, text = _tried(task, most).partition(" ")
    if kind == "error":
        raise _its_error(text)
    if kind != "bytes":
        raise _too_much(task, batch, most, f"more than {most / GIGABYTE:g} GB")
    weights, activations = (float(number) for number in text.split())
    total = WEIGHT_COPIES * weights + 2 * batch * activations / TRIED + pixels
    if total > most:
        raise _too_much(task, batch, most, f"about {total / GIGABYTE:.1f} GB")
    return total


def _too_much(task: Task, batch: int, most: float, size: str) -> Refused:
    return Refused(
        "limits",
        f"A batch of {batch} images of {' × '.join(map(str, task.sample_shape))} and the model would take {size} of "
        f"memory here; your limit is {most / GIGABYTE:g} GB (--max-memory).",
    )


def _tried(task: Task, most: float) -> str:
    """What the other process found; nothing if it died or took too long."""
    context = multiprocessing.get_context("fork")  # with everything that is imported: it is there at once
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_try, args=(task, most, theirs), daemon=True)
    child.start()
    theirs.close()
    try:
        return ours.recv_bytes().decode() if ours.poll(SECONDS) else ""
    except EOFError:
        return ""
    finally:
        child.kill()
        child.join()
        ours.close()


def _its_error(text: str) -> FedmllError:
    """An error that has to do with settings and files, not with memory: as it would be without the trial."""
    kind, _, words = text.partition(" ")
    kinds = {error.__name__: error for error in FedmllError.__subclasses__() if error is not Refused}
    return kinds.get(kind, FedmllError)(words)


def _try(task: Task, most: float, answer: Connection) -> None:
    """In the other process. Nobody hears what it prints."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    torch.set_num_threads(1)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = now + int(most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        answer.send_bytes("bytes {} {}".format(*_measured(task)).encode())
    except FedmllError as error:
        answer.send_bytes(f"error {type(error).__name__} {error}".encode())
    except Exception:
        answer.send_bytes(b"too much")  # memory errors have many names
    finally:
        os._exit(0)


def _measured(task: Task) -> tuple[float, float]:
    """Bytes of what is trained or kept in the model, and of what its modules give for TRIED images."""
    task = replace(task, device=torch.device("cpu"))
    model = make(task).model().eval()
    given = [0.0]

    def add(module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor):
            given[0] += output.numel() * output.element_size()

    for module in model.modules():
        module.register_forward_hook(add)
    with torch.inference_mode():
        model(torch.zeros(TRIED, *task.sample_shape))
    weights = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    return float(weights), given[0]
