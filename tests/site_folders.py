"""Small folders in the layouts of COCO and VOC, whose images show the same things and whose labels name different ones.

A thing is a coloured stripe of the image. COCO annotates dog, cat, couch and zebra; VOC annotates dog, cat, sofa and
aeroplane, and has never heard of a zebra, although its images show some.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedmll.data.sources import voc

THINGS = ("dog", "cat", "couch", "zebra", "aeroplane")
COLOURS = ((250, 20, 20), (20, 250, 20), (20, 20, 250), (240, 240, 20), (20, 240, 240))
COCO = ("dog", "cat", "couch", "zebra")
VOC_NAMES = {"dog": "dog", "cat": "cat", "couch": "sofa", "aeroplane": "aeroplane"}
CLASSES = ["dog", "cat", "couch", "zebra", "airplane"]
RENAME = {"sofa": "couch", "aeroplane": "airplane"}  # at the VOC site
SIDE = 20


def draw_things(count: int, seed: int) -> NDArray[np.bool_]:
    """(N, 5): which things an image shows; the first images show one of them each."""
    shown = np.random.default_rng(seed).random((count, len(THINGS))) < 0.4
    shown[: len(THINGS)] = np.eye(len(THINGS), dtype=bool)
    return shown


def save_image(path: Path, things: NDArray[np.bool_], seed: int) -> None:
    """One stripe per thing; what is not there is grey."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(90, 120, (SIDE, SIDE, 3)).astype(np.uint8)
    width = SIDE // len(THINGS)
    for place in np.flatnonzero(things):
        pixels[:, place * width : (place + 1) * width] = COLOURS[place]
    Image.fromarray(pixels).save(path, quality=95)


def write_coco(root: Path, train: int = 30, test: int = 12) -> None:
    names = [{"id": 10 + place, "name": name} for place, name in enumerate(COCO)]
    (root / "annotations").mkdir(parents=True)
    for part, count, seed in (("train", train, 1), ("val", test, 2)):
        shown = draw_things(count, seed)
        images, notes = [], []
        for number in range(count):
            file = f"COCO_{part}2014_{number:012d}.jpg"
            save_image(root / f"{part}2014" / file, shown[number], seed * 1000 + number)
            images.append({"id": number, "file_name": file})
            notes += [
                {"image_id": number, "category_id": 10 + COCO.index(THINGS[place])}
                for place in np.flatnonzero(shown[number])
                if THINGS[place] in COCO
            ]
        content = {"images": images, "annotations": notes, "categories": names}
        (root / "annotations" / f"instances_{part}2014.json").write_text(json.dumps(content))


def write_voc(root: Path, train: int = 30, test: int = 12) -> None:
    folder = root / "VOCdevkit" / "VOC2007"
    main = folder / "ImageSets" / "Main"
    main.mkdir(parents=True)
    for part, count, seed in (("trainval", train, 3), ("test", test, 4)):
        shown = draw_things(count, seed)
        images = [f"{seed:03d}{number:03d}" for number in range(count)]
        for number, image in enumerate(images):
            save_image(folder / "JPEGImages" / f"{image}.jpg", shown[number], seed * 1000 + number)
        (main / f"{part}.txt").write_text("".join(f"{image}\n" for image in images))
        column = {VOC_NAMES[thing]: place for place, thing in enumerate(THINGS) if thing in VOC_NAMES}
        for name in voc.CLASSES:
            present = shown[:, column[name]] if name in column else np.zeros(count, bool)
            lines = [f"{image} {1 if there else -1}\n" for image, there in zip(images, present, strict=True)]
            (main / f"{name}_{part}.txt").write_text("".join(lines))


def federation_of_both(root: Path, **changes: Any) -> dict[str, Any]:
    """The values of an experiment with both sites, below `root`."""
    write_coco(root / "coco")
    write_voc(root / "voc")
    return {
        "data": {"size": SIDE},
        "study": {"classes": CLASSES},
        "sites": [
            {"name": "coco", "data": "coco:2014", "root": str(root / "coco")},
            {"name": "voc", "data": "voc:2007", "root": str(root / "voc"), "rename": RENAME},
        ],
        "model": {"channels": (8, 8)},
        "training": {"rounds": 2, "batch_size": 8},
        "engine": {"workers": 0},
        **changes,
    }
