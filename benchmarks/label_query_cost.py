"""How much time the label-query methods add to the methods that they extend.

    FedLGT      one client's round / (FedC-Tran's round + one inference pass): the teacher predicts once per round
    FedNCA-ML   one training step / the same step without the two regularisers
    C-Tran      time and memory against the number of labels (--labels), with full attention between the labels and
                with attention through inducing tokens

The images are random. Each ratio is measured in one process with one thread, in turns. Times are CPU times of this
process, so that other programs on the machine matter little.

    python benchmarks/label_query_cost.py
    python benchmarks/label_query_cost.py --labels 17 80 400 1628
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedmll.config.experiment import Experiment
from fedmll.core.message import Message
from fedmll.data.dataset import Dataset
from fedmll.engines.client_trainer import Trainer
from fedmll.methods.framework.client_round import Client, ClientRound
from fedmll.methods.framework.task import Task
from fedmll.testing import client_with, compute_loss, start_round

LIMIT = 1.15
BATCH = 16


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    if options.one:
        one_batch(options.one[0], int(options.one[1]), int(options.one[2]), options.size, options.repeats)
        return
    if options.labels:
        by_labels(options.methods, options.labels, options.inducing, options.repeats)
        return
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
    print(f"largest ratio {worst:.3f}; goal: at most {LIMIT}: {'reached' if worst <= LIMIT else 'MISSED'}")


def lgt_round(data: Dataset, encoder: str, epochs: int, repeats: int) -> tuple[float, float, float]:
    plain = make_training(make_trainer("fedctran", data, {"training.local_epochs": epochs}), data)
    lgt = make_trainer("fedlgt", data, {"training.local_epochs": epochs, "method.encoder": encoder})
    whole = make_training(lgt, data)
    client = one_client(lgt, data)
    times = interleaved([whole, plain, lambda: ClientRound(client, Message()).outputs()], repeats)
    ratio = statistics.median(a / (b + c) for a, b, c in times)
    return ratio, statistics.median(t[1] for t in times), statistics.median(t[2] for t in times)


def nca_step(data: Dataset, repeats: int) -> tuple[float, float]:
    steps = [stepper(data, regularised) for regularised in (True, False)]
    times = interleaved(steps, 20 * repeats)
    return statistics.median(a / b for a, b in times), statistics.median(b for _, b in times)


def stepper(data: Dataset, regularised: bool) -> Callable[[], None]:
    changes = {"method.neg": regularised, "method.pos": regularised, "method.lambda_neg": 1.0}
    trainer = make_trainer("fednca-ml", data, changes)
    client_round = start_round(trainer, one_client(trainer, data))
    optimizer = torch.optim.AdamW(trainer.weights.parameters, fused=True)

    def step() -> None:
        compute_loss(trainer, client_round).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_labels(methods: list[str], counts: list[int], inducing: int, repeats: int) -> None:
    """Print the table. Every cell has a process of its own, because memory is the peak of a process."""
    print(f"one client's round of one batch of {BATCH} images: CPU seconds, and the additional peak memory\n")
    ways = (("full", 0), (f"{inducing} inducing tokens", inducing))
    header = ["method", "labels", *(f"{way}: {what}" for way, _ in ways for what in ("s", "MB"))]
    print("| " + " | ".join(header) + " |\n|---|" + "---:|" * (len(header) - 1))
    for name in methods:
        for classes in counts:
            cells = []
            for _, tokens in ways:
                command = [sys.executable, __file__, "--repeats", str(repeats), "--one", name, str(classes)]
                done = subprocess.run([*command, str(min(tokens, classes - 1))], check=True, stdout=subprocess.PIPE)
                seconds, memory = json.loads(done.stdout)
                cells += [f"{seconds:.2f}", f"{memory:.0f}"]
            print("| " + " | ".join([name, f"{classes:,}", *cells]) + " |", flush=True)


def one_batch(name: str, classes: int, inducing: int, size: int, repeats: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        changes: dict[str, Any] = {"method.inducing": inducing or None}
        if name == "fedlgt":
            changes["method.encoder"] = word_vectors(Path(folder) / "words.txt", classes + 2)
        few, many = (make_trainer(name, random_data(BATCH, c, size), changes) for c in (inducing + 2, classes))
    make_training(few, random_data(BATCH, inducing + 2, size))()  # allocates torch's own buffers, which do not count
    train, before = make_training(many, random_data(BATCH, classes, size)), in_memory("VmRSS")
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        train()
        times.append(time.process_time() - begin)
    print(json.dumps([statistics.median(times), in_memory("VmHWM") - before]))


def in_memory(what: str) -> float:
    """Memory of this process in MB: VmRSS is the current value, VmHWM the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) / 1024


def make_training(trainer: Trainer, data: Dataset) -> Callable[[], Message]:
    """A function that trains one client for one round."""
    client = one_client(trainer, data)
    message = Message(client.weights.dump())
    return lambda: trainer.train(client, message, {})


def make_trainer(name: str, data: Dataset, changes: dict[str, Any]) -> Trainer:
    experiment = Experiment().changed({"method.name": name, "training.batch_size": BATCH} | changes)
    return Trainer(Task(experiment, data.classes, data.sample_shape, 1, torch.device("cpu")))


def one_client(trainer: Trainer, data: Dataset) -> Client:
    return client_with(trainer, data, name="c000")


def random_data(samples: int, classes: int, size: int) -> Dataset:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (samples, 3, size, size), dtype=np.uint8)
    labels = (rng.random((samples, classes)) < 0.15).astype(np.int8)
    return Dataset(images, labels, tuple(f"thing{number}" for number in range(classes)))


def word_vectors(path: Path, classes: int) -> str:
    """Write random vectors for the words of the sentences, as a text encoder that needs no library."""
    words = ["the", "photo", "contains", "positive", "negative", *(f"thing{number}" for number in range(classes))]
    vectors = np.random.default_rng(1).normal(size=(len(words), 64))
    lines = (f"{word} {' '.join(f'{x:.6f}' for x in row)}\n" for word, row in zip(words, vectors, strict=True))
    path.write_text("".join(lines))
    return f"glove:{path}"


def interleaved(calls: list[Callable[[], Any]], repeats: int) -> list[list[float]]:
    """CPU seconds of each call. The calls take turns; the first turn warms up and is not returned."""
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
    parser.add_argument("--labels", nargs="+", type=int, help="measure only C-Tran, with these numbers of labels")
    parser.add_argument("--methods", nargs="+", default=["fedctran", "fedlgt"], help="for --labels")
    parser.add_argument("--inducing", default=32, type=int, help="number of inducing tokens, for --labels")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)  # in a child process: one cell of the table
    return parser.parse_args()


if __name__ == "__main__":
    main()
