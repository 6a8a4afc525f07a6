"""What a frozen backbone costs: MobileNetV2 (ImageNet) on COCO at 112 px, ten clients, FedAvg, one thread, CPU seconds.

    a round     heads on kept tokens / the same round through the network: the frozen network itself, which gives the
                same weights, and the network with all of it trained
    the cache   kept tokens of all images, computed by all cores / one plain inference pass over the same images

CPU time of this process and its children, so other programs on the machine matter little. Exit code 1: a claim fails.

    python benchmarks/frozen_cost.py --root DATA --images 800
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

from fedmll.data import federation
from fedmll.data.federation import Federation
from fedmll.data.images.cache import silent
from fedmll.engines.learner import Learner, with_tokens
from fedmll.experiment import Experiment
from fedmll.task import task_of

ROUND, CACHE = 1 / 20, 1.3  # the largest ratios that are wanted
PIXELS, AT_ONCE = 112, 32

T = TypeVar("T")


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FEDMLL_CACHE"] = folder
        good = measured(options)
    sys.exit(0 if good else 1)


def measured(options: argparse.Namespace) -> bool:
    data = training_images(federation.build(experiment(options, "backbone")))
    learner, images = Learner(task_of(data)), data.train.store
    print(f"{len(images)} images at {PIXELS} px, {int(data.sizes.sum())} of them train, at {len(data.names)} clients")

    plain, _ = seconds(lambda: inference(learner, images))
    parts = {"train": data.train}
    kept, found = seconds(lambda: with_tokens(learner.task, learner.model, parts, silent))
    on_tokens = replace(data, **found)
    print(f"plain inference pass {plain:.1f} s, cache {kept:.1f} s (CPU)")
    heads = min(seconds(lambda: one_round(learner, on_tokens))[0] for _ in range(3))
    through, _ = seconds(lambda: one_round(learner, data))
    whole = Learner(task_of(replace(data, experiment=experiment(options, "none"))))
    trained, _ = seconds(lambda: one_round(whole, data))
    print(f"a round: heads on tokens {heads:.2f} s, through the frozen network {through:.1f} s, ", end="")
    print(f"all of it trained {trained:.1f} s (CPU)")

    claims = [
        (f"cache / inference {kept / plain:.2f}", kept / plain, CACHE),
        (f"round on tokens / through the frozen network 1/{through / heads:.0f}", heads / through, ROUND),
        (f"round on tokens / with all of it trained 1/{trained / heads:.0f}", heads / trained, ROUND),
    ]
    for text, ratio, limit in claims:
        wanted = f"{limit:g}" if limit > 1 else f"1/{1 / limit:.0f}"
        print(f"{text}; at most {wanted} is wanted: {'good' if ratio <= limit else 'TOO MUCH'}")
    return all(ratio <= limit for _, ratio, limit in claims)


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
    """Its training images alone: the file has all of them, whatever the limit is."""
    rows = data.train.rows
    store, places = np.array(data.train.store[rows]), np.arange(len(rows))
    return replace(data, train=replace(data.train, store=store, rows=places))


def inference(learner: Learner, images: NDArray[Any]) -> None:
    """Every image once, as a plain loop does it."""
    backbone = learner.model.backbone.eval()
    with torch.inference_mode():
        for start in range(0, len(images), AT_ONCE):
            backbone(learner.task.inputs(torch.from_numpy(images[start : start + AT_ONCE])))


def one_round(learner: Learner, data: Federation) -> None:
    """FedAvg's round 1: everybody trains, the server averages."""
    method = learner.method
    state, merger = method.start(), method.merger(method.start(), 1)
    for index in learner.participants(data, 1):
        peer = learner.peers(data)[index]
        merger.add(peer, learner.train(learner.client(data, peer, 1), method.send(state, peer, 1), {}))
    merger.result()


def seconds(work: Callable[[], T]) -> tuple[float, T]:
    """CPU seconds of this process and of its children that have ended."""
    before = os.times()
    result = work()
    after = os.times()
    return sum(after[k] - before[k] for k in range(4)), result


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="where coco2014_8k_112.npz and the weights lie")
    parser.add_argument("--images", type=int, default=None, help="training images; all of them by default")
    return parser.parse_args()


if __name__ == "__main__":
    main()
