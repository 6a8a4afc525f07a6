"""What `predict` costs beside the plain loop: a hundred 12-megapixel JPEGs, decoded and seen by a small network.

    python benchmarks/predicting.py            about three minutes on two cores
    python benchmarks/predicting.py --images 20

The plain loop is what one would write by hand: open, convert, resize, a forward a batch of 64, one after the other.
Both take turns in one process; the ratio of each turn counts, its median is shown. Memory: the process's peak (VmHWM,
reset before each) above what it had before, for the first quarter of the images and for all of them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from rich.console import Console

from fedmll import load_run, run
from fedmll.cli.tables import plain_table
from fedmll.running.model import SavedModel
from fedmll.testing import experiment

BATCH = 64


def make_images(folder: Path, count: int) -> list[Path]:
    """4000 × 3000, smooth with some noise, as a camera's are; about 2 MB each."""
    generator, paths = np.random.default_rng(0), []
    for place in range(count):
        small = Image.fromarray(generator.integers(0, 256, (60, 80, 3), dtype=np.uint8))
        pixels = np.asarray(small.resize((4000, 3000), Image.Resampling.BICUBIC)).astype(np.int16)
        pixels += generator.integers(-8, 8, (3000, 4000, 1), dtype=np.int16)
        paths.append(folder / f"{place:03d}.jpg")
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(paths[-1], quality=85)
    return paths


def plain_loop(model: SavedModel, paths: list[Path]) -> np.ndarray:
    learner, (channels, height, width), found = model.learner, model.sample_shape, []
    for start in range(0, len(paths), BATCH):
        batch = np.empty((len(paths[start : start + BATCH]), channels, height, width), np.uint8)
        for place, path in enumerate(paths[start : start + BATCH]):
            with Image.open(path) as image:
                pixels = image.convert("L" if channels == 1 else "RGB").resize(
                    (width, height), Image.Resampling.BILINEAR
                )
            batch[place] = np.asarray(pixels).reshape(height, width, channels).transpose(2, 0, 1)
        with torch.inference_mode():
            found.append(learner.method.predict(learner.model, learner.task.inputs(torch.from_numpy(batch))).numpy())
    return np.concatenate(found)


def streamed(model: SavedModel, paths: list[Path]) -> np.ndarray:
    return np.stack(
        [prediction.probabilities for prediction in model.stream(paths) if prediction.probabilities is not None]
    )


def kilobytes(name: str) -> int:
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if name in line)


def peak(model: SavedModel, paths: list[Path]) -> float:
    """MB above what was there before."""
    before = kilobytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
    streamed(model, paths)
    return (kilobytes("VmHWM") - before) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--turns", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(experiment(training__rounds=1), Path(folder) / "run")
        model = load_run(Path(folder) / "run").model
        paths = make_images(Path(folder), asked.images)
        few = peak(model, paths[: asked.images // 4])
        everything = peak(model, paths)
        seconds: dict[str, list[float]] = {"plain loop": [], "stream": []}
        for _ in range(asked.turns):
            for name, way in (("plain loop", plain_loop), ("stream", streamed)):
                begin = time.perf_counter()
                found = way(model, paths)
                seconds[name].append(time.perf_counter() - begin)
                assert len(found) == len(paths)
        np.testing.assert_allclose(plain_loop(model, paths[:8]), streamed(model, paths[:8]), atol=1e-6)
    ratio = statistics.median(b / a for a, b in zip(seconds["plain loop"], seconds["stream"], strict=True))
    rows = [(name, f"{asked.images / statistics.median(times):.1f}") for name, times in seconds.items()]
    console = Console()
    console.print(plain_table(f"{asked.images} JPEGs of 12 megapixels", ("", "images a second"), rows))
    console.print(f"time of the stream / time of the loop: {ratio:.2f}")
    console.print(f"peak memory: {few:.0f} MB with {asked.images // 4} images, {everything:.0f} MB with {asked.images}")


if __name__ == "__main__":
    main()
