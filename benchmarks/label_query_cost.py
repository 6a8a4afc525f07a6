"""What the label-query methods add to the methods they extend, as ratios measured in one run, side by side.

    FedLGT      a client's round / (FedC-Tran's round + one inference pass): the teacher predicts once a round
    FedNCA-ML   a training step / the same step without the two regularisers

Random images, one thread, CPU time of this process, so other programs on the machine matter little.

    python benchmarks/label_query_cost.py
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedmll.client import Batch, Client, Step, Task, Work
from fedmll.data.dataset import Dataset
from fedmll.engines.learner import Learner
from fedmll.engines.optimiser import Optimiser
from fedmll.experiment import Experiment
from fedmll.message import Message
from fedmll.testing import work_of

LIMIT = 1.15


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for classes in options.classes:
            encoder = word_vectors(Path(folder) / f"{classes}.txt", classes)
            data = random_data(options.samples, classes, options.size)
            for epochs in (1, 5):
                ratio, plain, extra = lgt_round(data, encoder, epochs, options.repeats)
                worst = max(worst, ratio)
                print(
                    f"FedLGT, {classes} classes, {epochs} local epoch(s): round {ratio:.3f} × (FedC-Tran's round "
                    f"{plain:.2f} s + inference {extra:.2f} s)",
                    flush=True,
                )
            ratio, plain = nca_step(data, options.repeats)
            worst = max(worst, ratio)
            print(
                f"FedNCA-ML, {classes} classes: step {ratio:.3f} × the step without regularisers {1e3 * plain:.1f} ms"
            )
    print(f"largest ratio {worst:.3f}; at most {LIMIT} is wanted: {'good' if worst <= LIMIT else 'TOO MUCH'}")


def lgt_round(data: Dataset, encoder: str, epochs: int, repeats: int) -> tuple[float, float, float]:
    plain = trainer(make("fedctran", data, {"training.local_epochs": epochs}), data)
    lgt = make("fedlgt", data, {"training.local_epochs": epochs, "method.encoder": encoder})
    whole = trainer(lgt, data)
    client = one_client(lgt, data)
    times = interleaved([whole, plain, lambda: Work(client, Message()).look()], repeats)
    ratio = statistics.median(a / (b + c) for a, b, c in times)
    return ratio, statistics.median(t[1] for t in times), statistics.median(t[2] for t in times)


def nca_step(data: Dataset, repeats: int) -> tuple[float, float]:
    steps = [stepper(data, regularised) for regularised in (True, False)]
    times = interleaved(steps, 20 * repeats)
    return statistics.median(a / b for a, b in times), statistics.median(b for _, b in times)


def stepper(data: Dataset, regularised: bool) -> Callable[[], None]:
    changes = {"method.neg": regularised, "method.pos": regularised, "method.lambda_neg": 1.0}
    learner = make("fednca-ml", data, changes)
    work = work_of(learner, one_client(learner, data))
    optimiser = Optimiser(learner.task.experiment.training, learner.weights.parameters, {})
    raw, targets = torch.from_numpy(data.samples(slice(0, 32))), torch.from_numpy(data.labels[:32])

    def step() -> None:
        batch = Batch(learner.task, torch.arange(32), raw, targets, "none", torch.Generator())
        learner.loss(Step(work, batch)).backward()
        optimiser.step()

    return step


def trainer(learner: Learner, data: Dataset) -> Callable[[], Message]:
    client = one_client(learner, data)
    message = Message(client.weights.dump())
    return lambda: learner.train(client, message, {})


def make(name: str, data: Dataset, changes: dict[str, Any]) -> Learner:
    experiment = Experiment().changed({"method.name": name, "training.batch_size": 16} | changes)
    return Learner(Task(experiment, data.classes, data.sample_shape, 1, torch.device("cpu")))


def one_client(learner: Learner, data: Dataset) -> Client:
    everything = torch.ones(len(data.classes), dtype=torch.bool)
    return Client(learner.task, "c000", 1, data, everything, everything, learner.model, learner.weights)


def random_data(samples: int, classes: int, size: int) -> Dataset:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (samples, 3, size, size), dtype=np.uint8)
    labels = (rng.random((samples, classes)) < 0.15).astype(np.int8)
    return Dataset(images, labels, tuple(f"thing{number}" for number in range(classes)))


def word_vectors(path: Path, classes: int) -> str:
    """A text encoder that needs no library: random vectors for the words of the sentences."""
    words = ["the", "photo", "contains", "positive", "negative", *(f"thing{number}" for number in range(classes))]
    vectors = np.random.default_rng(1).normal(size=(len(words), 64))
    lines = (f"{word} {' '.join(f'{x:.6f}' for x in row)}\n" for word, row in zip(words, vectors, strict=True))
    path.write_text("".join(lines))
    return f"glove:{path}"


def interleaved(calls: list[Callable[[], Any]], repeats: int) -> list[list[float]]:
    """CPU seconds of each call, again and again in turn, after one turn to warm up."""
    times = []
    for turn in range(repeats + 1):
        row = []
        for call in calls:
            begin = time.process_time()
            call()
            row.append(time.process_time() - begin)
        if turn:
            times.append(row)
    return times


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", nargs="+", default=[10, 80], type=int)
    parser.add_argument("--samples", default=128, type=int, help="of the client")
    parser.add_argument("--size", default=64, type=int, help="side of the images")
    parser.add_argument("--repeats", default=5, type=int)
    return parser.parse_args()


if __name__ == "__main__":
    main()
