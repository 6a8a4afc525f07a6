"""Random data of FLAIR's shape (51,414 users, 429,078 tiny images, 17 and 1,628 labels), and the cost of opening it.

    python benchmarks/flair_shaped.py FOLDER                  write it (minutes: one file per image), unless it exists
    python benchmarks/flair_shaped.py FOLDER --open fine      open it: seconds, memory, the images of a round
    python benchmarks/flair_shaped.py FOLDER --layout users   as one HDF5 file by user, as ml-flair writes it
    python benchmarks/flair_shaped.py FOLDER --layout pfl     as one HDF5 file, as pfl-research writes it
    python benchmarks/flair_shaped.py --partition             a Dirichlet partition over 51,414 clients; also with
                                                              --presence 0.5, --combinations 100000

What is published of FLAIR's users (github.com/apple/ml-flair, README and explore_labels.ipynb): 41,131, 5,141 and 5,142
train, validate and test. Images per user: mean 8.35, std 51.3, quartiles 1, 2 and 5, at most 4,151; an image has 2.79
coarse and 4.61 fine labels. The sizes here have exactly this mean, these quartiles and this maximum, and std 47:
between the largest user and the upper quartile log(size) is a parabola of log(rank), bent so that the total is right.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

USERS, IMAGES, COARSE, FINE = 51_414, 429_078, 17, 1_628
SHARES = {"train": 41_131 / USERS, "val": 5_141 / USERS, "test": 5_142 / USERS}
QUARTILES, LARGEST = (5, 2, 1), 4_151  # images per user, from above
KINDS = 24  # different images; all others are links to them, but a file system limits the links to one file
LINKS = 30_000
SIDE = 8  # pixels


class Photo(NamedTuple):
    image: str
    coarse: list[str]
    fine: list[str]


def sizes(users: int = USERS, images: int = IMAGES) -> np.ndarray:
    """Images of each user, the largest first."""
    rank = np.log((np.arange(users) + 0.5) / users)
    known = np.log([0.5 / users, 0.25, 0.5, 0.75])
    straight = np.interp(rank, known, np.log([LARGEST * images / IMAGES, *QUARTILES]))
    place = np.clip((rank - known[0]) / (known[1] - known[0]), 0, 1)
    low, high = 0.0, 20.0
    for _ in range(50):  # the bend that gives the total
        bend = (low + high) / 2
        counts = np.maximum(1, np.round(np.exp(straight + bend * place * (1 - place)))).astype(int)
        low, high = (bend, high) if counts.sum() < images else (low, bend)
    counts[1 : 1 + abs(images - counts.sum())] += np.sign(images - counts.sum())
    return counts


def users_of(users: int, images: int) -> Iterator[tuple[str, str, list[Photo]]]:
    """Name, split and photographs of every user, in an order that does not depend on their sizes."""
    rng = np.random.default_rng(0)
    counts = rng.permutation(sizes(users, images))
    ends = np.round(np.cumsum(list(SHARES.values())) * users)
    parts = rng.permutation(np.searchsorted(ends, np.arange(users), side="right"))
    number = 0
    for user, (count, part) in enumerate(zip(counts.tolist(), parts.tolist(), strict=True)):
        photos = []
        for _ in range(count):
            drawn = (FINE * rng.random(1 + rng.poisson(3.63)) ** 3).astype(int)
            coarse = sorted({f"coarse_{label % COARSE:02d}" for label in drawn[:3]})
            photos.append(Photo(f"{14 * 10**9 + 97 * number:011d}", coarse, sorted({f"fine_{c:04d}" for c in drawn})))
            number += 1
        yield f"{user:08d}@N00", list(SHARES)[part], photos


def write(folder: Path, users: int = USERS, images: int = IMAGES) -> None:
    """labels_and_metadata.json and small_images/."""
    rng = np.random.default_rng(0)
    (folder / "small_images").mkdir(parents=True)
    kinds: list[Path] = []
    for _ in range(max(KINDS, -(-images // LINKS))):
        stream = io.BytesIO()
        Image.fromarray(rng.integers(256, size=(16, 16, 3), dtype=np.uint8)).save(stream, "JPEG")
        kinds.append(folder / f"kind-{len(kinds)}.jpg")
        kinds[-1].write_bytes(stream.getvalue())
    number = 0
    with (folder / "labels_and_metadata.json").open("w") as file:
        for user, part, photos in users_of(users, images):
            for image, coarse, fine in photos:
                os.link(kinds[number % len(kinds)], folder / "small_images" / f"{image}.jpg")
                entry = {"user_id": user, "image_id": image, "labels": coarse, "partition": part}
                entry["fine_grained_labels"] = fine
                file.write(("[\n" if number == 0 else ",\n") + json.dumps(entry))
                number += 1
        file.write("]\n")


def write_hdf5(file: Path, sparse: bool, users: int = USERS, images: int = IMAGES) -> None:
    import h5py

    file.parent.mkdir(parents=True, exist_ok=True)
    names = {
        "label": [f"coarse_{place:02d}" for place in range(COARSE)],
        "fine_grained_label": [f"fine_{place:04d}" for place in range(FINE)],
    }
    places = {kind: {name: place for place, name in enumerate(known)} for kind, known in names.items()}
    with h5py.File(file, "w", libver="latest") as archive:
        for user, part, photos in users_of(users, images):
            group = archive.create_group(f"{part}/{user}")
            group["images"] = np.full((len(photos), SIDE, SIDE, 3), len(photos) % 256, dtype=np.uint8)
            group["image_ids"] = [photo.image.encode() for photo in photos]
            for kind, listed in (
                ("label", [p.coarse for p in photos]),
                ("fine_grained_label", [p.fine for p in photos]),
            ):
                if sparse:
                    pairs = [(row, places[kind][name]) for row, shown in enumerate(listed) for name in shown]
                    group[f"{kind}s_row"], group[f"{kind}s_col"] = np.array(pairs, dtype=np.uint16).T
                else:
                    group[f"{kind}s"] = ["|".join(shown).encode() for shown in listed]
        for kind, known in places.items() if sparse else ():
            archive[f"metadata/{kind}_mapping"] = json.dumps(known)


def measure_opening(root: Path, kind: str) -> None:
    """Print the cost of opening the data, and how many images a round of 50 users reads."""
    from fedmll.data import participation
    from fedmll.data.images.decode import LazyImages
    from fedmll.data.sources import load

    before, begin = time.process_time(), time.perf_counter()
    splits = load(f"flair:{kind}", root)
    took, wall = time.process_time() - before, time.perf_counter() - begin
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"flair:{kind}: {len(splits.train):,} training images, {len(splits.train.classes):,} labels")
    print(f"opened in {took:.1f} s of CPU ({wall:.1f} s), peak memory {memory:.0f} MB")
    read: list[int] = []
    store: Any = splits.train.store
    assert isinstance(store, LazyImages)
    original_read = store.read

    def counting_read(row: int) -> Any:
        read.append(row)
        return original_read(row)

    store.read = counting_read
    groups = splits.train.groups
    assert groups is not None
    starts = np.flatnonzero(np.append(True, groups[1:] != groups[:-1]))
    counts = np.diff(np.append(starts, len(groups)))
    chosen = participation.choose_clients(counts, 1, 0, fraction=1.0, count=50, sampling="size")
    begin = time.process_time()
    for user in chosen:
        splits.train.subset(np.arange(starts[user], starts[user] + counts[user])).samples(slice(None))
    store.read = original_read
    print(f"a round of 50 of {len(starts):,} users: {counts[chosen].sum():,} images, {len(read):,} images read, "
          f"{time.process_time() - begin:.1f} s")  # fmt: skip


def measure_partition(presence: float, combinations: int) -> None:
    """Print the cost of a Dirichlet partition. It has as many images and clients as FLAIR, about 2.5 of 17 labels per
    image, and this number of label combinations."""
    from fedmll.data.partition import partition

    rng = np.random.default_rng(0)
    known = (rng.random((combinations, COARSE)) < 0.15).astype(np.int8)
    labels = known[rng.integers(0, combinations, IMAGES)]
    before = time.process_time()
    found = partition(labels, "dirichlet", USERS, 0, beta=0.5, presence=presence, minimum=3)
    took = time.process_time() - before
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{IMAGES:,} images, {len(np.unique(labels, axis=0)):,} combinations of {COARSE} labels, {USERS:,} clients, "
          f"presence {presence:g}: {took:.1f} s of CPU, peak memory {memory:.0f} MB; {found.report}")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--layout", choices=("raw", "users", "pfl"), default="raw")
    parser.add_argument("--open", choices=("coarse", "fine"))
    parser.add_argument("--partition", action="store_true")
    parser.add_argument("--combinations", type=int, default=2000)
    parser.add_argument("--presence", type=float, default=1.0)
    options = parser.parse_args()
    if options.partition:
        measure_partition(options.presence, options.combinations)
    if options.folder is not None:
        root = options.folder if options.layout == "raw" else options.folder / options.layout / "flair.hdf5"
        if options.layout == "raw" and not (root / "labels_and_metadata.json").is_file():
            write(root)
        elif options.layout != "raw" and not root.is_file():
            write_hdf5(root, options.layout == "pfl")
        if options.open:
            os.environ.setdefault("FEDMLL_CACHE", str(Path(tempfile.gettempdir()) / "fedmll-flair-shaped"))
            measure_opening(root, options.open)
