"""The cost of training on a frozen backbone: MobileNetV2 (ImageNet) on COCO at 112 px, ten clients, FedAvg, one thread.

    a round     a head on cached tokens / the same round with images through the frozen network, which gives the same
                weights, and / the same round with the whole network trained
    the cache   computing the tokens of all images on all cores / one plain inference pass over the same images

Times are CPU seconds of this process and its children, so that other programs on the machine matter little. The exit
code is 1 if a goal is missed.

    python benchmarks/frozen_backbone_cost.py --root DATA --images 800
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from fedmll.config.experiment import Experiment
from fedmll.data import federation
from fedmll.data.federation import Federation
from fedmll.data.images.cache import no_progress
from fedmll.engines.client_trainer import Trainer, with_tokens
from fedmll.methods.framework.task import task_of

ROUND, CACHE = 1 / 20, 1.3  # goals: the largest ratios
PIXELS, BATCH = 112, 32

T = TypeVar("T")


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FEDMLL_CACHE"] = folder
        reached = measure(options)
    sys.exit(0 if reached else 1)


def measure(options: argparse.Namespace) -> bool:
    """Print the times and ratios. Returns whether all goals are reached."""
    data = training_images(federation.build(experiment(options, "backbone")))
    trainer, images = Trainer(task_of(data)), data.train.store
    print(f"{len(images)} images at {PIXELS} px, {int(data.sizes.sum())} of them train, at {len(data.names)} clients")

    plain, _ = seconds(lambda: inference(trainer, images))
    parts = {"train": data.train}
    caching, datasets = seconds(lambda: with_tokens(trainer.task, trainer.model, parts, no_progress))
    on_tokens = replace(data, **datasets)
    print(f"plain inference pass {plain:.1f} s, cache {caching:.1f} s (CPU)")
    heads = min(seconds(lambda: one_round(trainer, on_tokens))[0] for _ in range(3))
    through, _ = seconds(lambda: one_round(trainer, data))
    whole = Trainer(task_of(replace(data, experiment=experiment(options, "none"))))
    trained, _ = seconds(lambda: one_round(whole, data))
    print(f"a round: head on cached tokens {heads:.2f} s, through the frozen network {through:.1f} s, ", end="")
    print(f"whole network trained {trained:.1f} s (CPU)")

    goals = [
        (f"cache / inference {caching / plain:.2f}", caching / plain, CACHE),
        (f"round on cached tokens / through the frozen network 1/{through / heads:.0f}", heads / through, ROUND),
        (f"round on cached tokens / with the whole network trained 1/{trained / heads:.0f}", heads / trained, ROUND),
    ]
    for text, ratio, limit in goals:
        goal = f"{limit:g}" if limit > 1 else f"1/{1 / limit:.0f}"
        print(f"{text}; goal: at most {goal}: {'reached' if ratio <= limit else 'MISSED'}")
    return all(ratio <= limit for _, ratio, limit in goals)


def experiment(options: argparse.Namespace, freeze: str) -> Experiment:
    return Experiment.make(
        {
            "data": {
                "name": "packed:coco2014_8k_112.npz",
                "root": options.root,
                "size": PIXELS,
                "limit": options.images,
            },
            "partition": {"kind": "dirichlet", "clients": 10, "beta": 0.3, "presence": 0.7},
            "model": {
                "backbone": "mobilenet-v2",
                "weights": str(Path(options.root) / "mobilenet_v2_imagenet.safetensors"),
                "freeze": freeze,
            },
            "engine": {"workers": 0},
        }
    )


def training_images(data: Federation) -> Federation:
    """The federation with a store of its training images only: the file has all images, whatever the limit is."""
    rows = data.train.rows
    store: Any = np.array(data.train.store[rows])
    return replace(data, train=replace(data.train, store=store, rows=np.arange(len(rows))))


def inference(trainer: Trainer, images: NDArray[Any]) -> None:
    """One plain inference pass over the images."""
    backbone = trainer.model.backbone.eval()
    with torch.inference_mode():
        for start in range(0, len(images), BATCH):
            backbone(trainer.task.preprocess(torch.from_numpy(images[start : start + BATCH])))


def one_round(trainer: Trainer, data: Federation) -> None:
    """Round 1 of FedAvg: the clients train and the server averages."""
    method = trainer.method
    state, aggregator = method.initial_state(), method.aggregator(method.initial_state(), 1)
    for index in trainer.participants(data, 1):
        info = trainer.client_infos(data)[index]
        aggregator.add(info, trainer.train(trainer.client_in_round(data, info, 1), method.send(state, info, 1), {}))
    aggregator.result()


def seconds(work: Callable[[], T]) -> tuple[float, T]:
    """CPU seconds of this process and of its finished children, and the result."""
    before = os.times()
    result = work()
    after = os.times()
    return sum(after[k] - before[k] for k in range(4)), result


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="the folder with coco2014_8k_112.npz and the weights")
    parser.add_argument("--images", type=int, default=None, help="number of training images; default: all")
    return parser.parse_args()


if __name__ == "__main__":
    main()
