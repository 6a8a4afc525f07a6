"""Data of FLAIR's shape (51,414 users, 429,078 tiny images, 17 and 1,628 labels), and what it costs to open it.

    python benchmarks/flair_shaped.py FOLDER             write it (some minutes: a file an image) unless it is there
    python benchmarks/flair_shaped.py FOLDER --open fine     open it in this process: seconds, memory, a round's images

The sizes of users follow a power law with FLAIR's mean of 8.3 images (its own sizes are in its metadata alone); the
split divides users 8 : 1 : 1.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

USERS, IMAGES, COARSE, FINE = 51_414, 429_078, 17, 1_628
KINDS = 24  # different images; the others are links to them: a file system's links to one file are limited
LINKS = 30_000


def sizes(users: int, images: int) -> np.ndarray:
    """Images of each user: most have a few, some have hundreds."""
    weight = (1 + np.arange(users)) ** -0.55
    counts = 1 + np.floor(weight / weight.sum() * (images - users)).astype(int)
    counts[: images - counts.sum()] += 1
    return counts


def write(folder: Path, users: int = USERS, images: int = IMAGES) -> None:
    rng = np.random.default_rng(0)
    (folder / "small_images").mkdir(parents=True)
    kinds = []
    for _ in range(max(KINDS, -(-images // LINKS))):
        stream = io.BytesIO()
        Image.fromarray(rng.integers(256, size=(16, 16, 3), dtype=np.uint8)).save(stream, "JPEG")
        kinds.append(folder / f"kind-{len(kinds)}.jpg")
        kinds[-1].write_bytes(stream.getvalue())
    number = 0
    with (folder / "labels_and_metadata.json").open("w") as file:
        for user, count in enumerate(sizes(users, images).tolist()):
            part = "train" if user % 10 < 8 else ("val" if user % 10 == 8 else "test")
            fine = np.unique((FINE * rng.random((count, 5)) ** 3).astype(int), axis=1)
            for row in fine.tolist():
                image = f"{number:032x}"
                os.link(kinds[number % len(kinds)], folder / "small_images" / f"{image}.jpg")
                entry = {
                    "user_id": f"{user:08d}@N00",
                    "image_id": image,
                    "partition": part,
                    "labels": sorted({f"coarse_{label % COARSE:02d}" for label in row}),
                    "fine_grained_labels": sorted({f"fine_{label:04d}" for label in row}),
                }
                file.write(("[\n" if number == 0 else ",\n") + json.dumps(entry))
                number += 1
        file.write("]\n")


def opened(folder: Path, kind: str) -> None:
    from fedmll.data import participation
    from fedmll.data.images import lazy
    from fedmll.data.sources import load

    before, begin = time.process_time(), time.perf_counter()
    splits = load(f"flair:{kind}", folder)
    took, wall = time.process_time() - before, time.perf_counter() - begin
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"flair:{kind}: {len(splits.train):,} training images, {len(splits.train.classes):,} labels")
    print(f"opened in {took:.1f} s of CPU ({wall:.1f} s), {memory:.0f} MB at most")
    read: list[str] = []
    decode = lazy.decode_image

    def counted(file: Path, shape: tuple[int, ...]) -> np.ndarray:
        read.append(str(file))
        return decode(file, shape)

    lazy.decode_image = counted  # type: ignore[assignment]
    groups = splits.train.groups
    assert groups is not None
    starts = np.flatnonzero(np.append(True, groups[1:] != groups[:-1]))
    counts = np.diff(np.append(starts, len(groups)))
    chosen = participation.choose(counts, 1, 0, fraction=1.0, count=50, sampling="size")
    begin = time.process_time()
    for user in chosen:
        splits.train.subset(np.arange(starts[user], starts[user] + counts[user])).samples(slice(None))
    lazy.decode_image = decode
    print(f"a round of 50 of {len(starts):,} users: {counts[chosen].sum():,} images, {len(read):,} files read, "
          f"{time.process_time() - begin:.1f} s")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--open", choices=("coarse", "fine"))
    given = parser.parse_args()
    if not (given.folder / "labels_and_metadata.json").is_file():
        write(given.folder)
    if given.open:
        os.environ.setdefault("FEDMLL_CACHE", str(Path(tempfile.gettempdir()) / "fedmll-flair-shaped"))
        opened(given.folder, given.open)
