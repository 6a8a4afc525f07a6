"""How much memory an experiment needs at a site, measured before this process allocates any of it.

A separate process, which may not grow beyond the limit, builds the network and predicts two images. Whatever sizes a
server asks for, the worst case is that this process ends.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import resource
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedmll.core.errors import FedmllError
from fedmll.deploy.error_codes import SiteError, SiteErrorCode
from fedmll.methods import build_method
from fedmll.methods.framework.task import Task

TRIAL_SECONDS = 120  # for building the network and predicting two images
TRIAL_IMAGES = 2
PIXEL_BYTES = 4
WEIGHT_COPIES = 6  # the weights, their gradients, two moments of the optimizer, the received message, the reply
GIGABYTE = 1e9


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """What the trial measured."""

    weights: float  # bytes of all parameters and buffers
    activations: float  # bytes of the modules' outputs for TRIAL_IMAGES images
    width: int  # the number of features per image


def estimate_memory(task: Task, images: int, limit: float) -> float:
    """Bytes for the model and one batch, which is not larger than the number of images.

    Raises:
        SiteError: the model and one batch do not fit into `limit`.
        FedmllError: the network cannot be built for another reason, such as an invalid setting.
    """
    batch = min(task.experiment.training.batch_size, images)
    pixels = 2.0 * batch * math.prod(task.sample_shape) * PIXEL_BYTES  # raw pixels, and the input of the network
    size = None if pixels > limit else _measure(task, limit)
    if size is None:
        raise _too_large(task, batch, limit, f"more than {limit / GIGABYTE:g} GB")
    total = WEIGHT_COPIES * size.weights + 2 * batch * size.activations / TRIAL_IMAGES + pixels
    if total > limit:
        raise _too_large(task, batch, limit, f"about {total / GIGABYTE:.1f} GB")
    return total


def find_feature_width(task: Task, limit: float) -> int:
    """The number of features per image. Call it after `estimate_memory`, when it is known that the model fits."""
    size = _measure(task, limit)
    if size is None:
        raise SiteError(
            SiteErrorCode.LIMITS, "The number of the model's features could not be found within --max-memory. Raise it."
        )
    return size.width


def _too_large(task: Task, batch: int, limit: float, size: str) -> SiteError:
    return SiteError(
        SiteErrorCode.LIMITS,
        f"A batch of {batch} images of {' × '.join(map(str, task.sample_shape))} and the model would need {size} of "
        f"memory here; your limit is {limit / GIGABYTE:g} GB (--max-memory).",
    )


def _measure(task: Task, limit: float) -> ModelSize | None:
    """The size of the model; None: the trial exceeded the limit or took too long."""
    context = multiprocessing.get_context("fork")  # imported modules are there at once
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_run_trial, args=(task, limit, sender), daemon=True)
    child.start()
    sender.close()
    try:
        answer = json.loads(receiver.recv_bytes()) if receiver.poll(TRIAL_SECONDS) else {}
    except EOFError:
        answer = {}
    finally:
        child.kill()
        child.join()
        receiver.close()
    if "error" in answer:
        kinds = {kind.__name__: kind for kind in FedmllError.__subclasses__() if kind is not SiteError}
        raise kinds.get(answer["error"], FedmllError)(answer["text"])
    return ModelSize(**answer["size"]) if "size" in answer else None


def _run_trial(task: Task, limit: float, sender: Connection) -> None:
    """In the other process. Its output is not shown."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    torch.set_num_threads(1)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = now + int(limit)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    try:
        answer: dict[str, Any] = {"size": asdict(_model_size(task))}
    except FedmllError as error:  # a problem with settings or files, not with memory
        answer = {"error": type(error).__name__, "text": str(error)}
    except Exception:
        answer = {}  # memory errors have many types
    try:
        sender.send_bytes(json.dumps(answer).encode())
    finally:
        os._exit(0)


def _model_size(task: Task) -> ModelSize:
    task = replace(task, device=torch.device("cpu"))
    model = build_method(task).build_model().eval()
    activations = 0.0

    def add(module: nn.Module, inputs: object, output: object) -> None:
        nonlocal activations
        if isinstance(output, Tensor):
            activations += output.numel() * output.element_size()

    for module in model.modules():
        module.register_forward_hook(add)
    with torch.inference_mode():
        model(torch.zeros(TRIAL_IMAGES, *task.sample_shape))
    weights = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
    return ModelSize(weights=float(weights), activations=activations, width=model.width)
