"""The speed of `predict` compared with a plain loop: a hundred JPEGs of 12 megapixels and a small network.

    python benchmarks/prediction_speed.py            about three minutes on two cores
    python benchmarks/prediction_speed.py --images 20

The plain loop is what one would write by hand: open, convert, resize, one forward pass per batch of 64. Both take turns
in one process, and the median of the ratios of the turns is shown. Memory is the peak of the process (VmHWM, reset
before each measurement) minus its memory before, for the first quarter of the images and for all of them.
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
from fedmll.cli.output import plain_table
from fedmll.inference.model_file import SavedModel
from fedmll.testing import experiment

BATCH = 64


def make_images(folder: Path, count: int) -> list[Path]:
    """Write images of 4000 × 3000 pixels, smooth with some noise as from a camera, about 2 MB each."""
    generator, paths = np.random.default_rng(0), []
    for place in range(count):
        small = Image.fromarray(generator.integers(0, 256, (60, 80, 3), dtype=np.uint8))
        pixels = np.asarray(small.resize((4000, 3000), Image.Resampling.BICUBIC)).astype(np.int16)
        pixels += generator.integers(-8, 8, (3000, 4000, 1), dtype=np.int16)
        paths.append(folder / f"{place:03d}.jpg")
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(paths[-1], quality=85)
    return paths


def plain_loop(model: SavedModel, paths: list[Path]) -> np.ndarray:
    trainer, (channels, height, width), found = model.trainer, model.sample_shape, []
    for start in range(0, len(paths), BATCH):
        batch = np.empty((len(paths[start : start + BATCH]), channels, height, width), np.uint8)
        for place, path in enumerate(paths[start : start + BATCH]):
            with Image.open(path) as image:
                pixels = image.convert("L" if channels == 1 else "RGB").resize(
                    (width, height), Image.Resampling.BILINEAR
                )
            batch[place] = np.asarray(pixels).reshape(height, width, channels).transpose(2, 0, 1)
        with torch.inference_mode():
            found.append(
                trainer.method.predict(trainer.model, trainer.task.preprocess(torch.from_numpy(batch))).numpy()
            )
    return np.concatenate(found)


def stream(model: SavedModel, paths: list[Path]) -> np.ndarray:
    return np.stack(
        [prediction.probabilities for prediction in model.stream(paths) if prediction.probabilities is not None]
    )


def kilobytes(field: str) -> int:
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if field in line)


def added_memory(model: SavedModel, paths: list[Path]) -> float:
    """The peak memory while predicting, in MB, minus the memory before."""
    before = kilobytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    stream(model, paths)
    return (kilobytes("VmHWM") - before) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(experiment(training__rounds=1), Path(folder) / "run")
        model = load_run(Path(folder) / "run").model
        paths = make_images(Path(folder), options.images)
        quarter = added_memory(model, paths[: options.images // 4])
        whole = added_memory(model, paths)
        seconds: dict[str, list[float]] = {"plain loop": [], "stream": []}
        for _ in range(options.turns):
            for name, way in (("plain loop", plain_loop), ("stream", stream)):
                begin = time.perf_counter()
                probabilities = way(model, paths)
                seconds[name].append(time.perf_counter() - begin)
                assert len(probabilities) == len(paths)
        np.testing.assert_allclose(plain_loop(model, paths[:8]), stream(model, paths[:8]), atol=1e-6)
    ratio = statistics.median(b / a for a, b in zip(seconds["plain loop"], seconds["stream"], strict=True))
    rows = [(name, f"{options.images / statistics.median(times):.1f}") for name, times in seconds.items()]
    console = Console()
    console.print(plain_table(f"{options.images} JPEGs of 12 megapixels", ("", "images per second"), rows))
    console.print(f"time of the stream / time of the loop: {ratio:.2f}")
    console.print(
        f"peak memory: {quarter:.0f} MB with {options.images // 4} images, {whole:.0f} MB with {options.images}"
    )


if __name__ == "__main__":
    main()
