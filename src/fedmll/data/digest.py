"""What a run's data was: enough to recognise it again, and to say what changed if it is not the same."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np

from fedmll.data.dataset import PRESENT, UNKNOWN, Dataset

IMAGES_AT_ONCE = 1024
LARGEST_READ = 1 << 29  # bytes: of a larger store only samples spread evenly over it are read

Facts = dict[str, Any]  # plain JSON


def facts_of(parts: dict[str, Dataset], every_image: bool = False) -> dict[str, Facts]:
    """Facts about each part (training, validation, test data) that has samples."""
    return {name: _facts(data, every_image) for name, data in parts.items() if len(data)}


def digest_of(parts: dict[str, Dataset], every_image: bool = False) -> str:
    """The facts as one short word. With `every_image` no image of a large store is left out."""
    return hashlib.blake2b(json.dumps(facts_of(parts, every_image)).encode(), digest_size=16).hexdigest()


def _facts(data: Dataset, every_image: bool) -> Facts:
    return {
        "samples": len(data),
        "shape": list(data.sample_shape),
        "classes": list(data.classes),
        "present": (data.labels == PRESENT).sum(axis=0).tolist(),
        "unknown": (data.labels == UNKNOWN).sum(axis=0).tolist(),
        "labels": _hash(np.ascontiguousarray(data.labels)),
        "images": _images(data, every_image),
    }


def _images(data: Dataset, every_image: bool) -> str:
    """A hash of the samples in their order. Images that are decoded when they are asked for have a key instead."""
    if (key := getattr(data.store, "key", None)) is not None:
        return hashlib.blake2b(str(key).encode() + data.rows.tobytes(), digest_size=16).hexdigest()
    size = int(np.prod(data.sample_shape)) * data.store.itemsize
    step = 1 if every_image else max(1, -(-len(data) * size // LARGEST_READ))
    chosen = np.arange(0, len(data), step)
    digest = hashlib.blake2b(digest_size=16)
    for start in range(0, len(chosen), IMAGES_AT_ONCE):
        digest.update(np.ascontiguousarray(data.samples(chosen[start : start + IMAGES_AT_ONCE])).tobytes())
    return digest.hexdigest()


def _hash(array: np.ndarray) -> str:
    return hashlib.blake2b(array.tobytes(), digest_size=16).hexdigest()


def changes(before: dict[str, Facts], now: dict[str, Facts]) -> list[str]:
    """What is not as it was, in words; empty if all is."""
    found = []
    for part in sorted(before.keys() | now.keys()):
        if part not in now or part not in before:
            found.append(f"there is {part} data now" if part in now else f"there is no {part} data any more")
            continue
        old, new = before[part], now[part]
        if old["samples"] != new["samples"]:
            found.append(f"the {part} data has {new['samples']} samples, not {old['samples']}")
        if old["classes"] != new["classes"]:
            gone = [f"{name} is gone" for name in old["classes"] if name not in new["classes"]]
            come = [f"{name} is new" for name in new["classes"] if name not in old["classes"]]
            words = [*gone, *come] or ["they are in another order"]
            found.append(f"the classes of the {part} data changed ({', '.join(words[:5])})")
        elif old["labels"] != new["labels"] and old["samples"] == new["samples"]:
            found.append(f"labels of the {part} data changed ({_which(old, new)})")
        if old["shape"] != new["shape"]:
            found.append(f"the {part} samples are {new['shape']}, not {old['shape']}")
        elif old["images"] != new["images"] and old["samples"] == new["samples"]:
            found.append(f"images of the {part} data changed, or their order did")
    return found


def _which(old: Facts, new: Facts) -> str:
    moved = [
        f"{name}: {was} → {is_now} present"
        for name, was, is_now in zip(old["classes"], old["present"], new["present"], strict=True)
        if was != is_now
    ]
    if not moved:
        return "as many of each class as before"
    return ", ".join(moved[:3]) + (f" and {len(moved) - 3} more classes" if len(moved) > 3 else "")
