"""Fingerprints of data: recognise the data of a run, and describe what changed if it differs."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np

from fedmll.data.dataset import PRESENT, UNKNOWN, Dataset

IMAGES_AT_ONCE = 1024
LARGEST_READ = 1 << 29  # bytes: from a larger store only evenly spaced samples are read

Fingerprint = dict[str, Any]  # JSON values


def compute_fingerprints(parts: dict[str, Dataset], every_image: bool = False) -> dict[str, Fingerprint]:
    """The fingerprint of each part (training, validation, test data) that has samples."""
    return {name: _fingerprint(data, every_image) for name, data in parts.items() if len(data)}


def compute_digest(parts: dict[str, Dataset], every_image: bool = False) -> str:
    """One hash of all fingerprints. With `every_image`, all images of a large store are read."""
    return hashlib.blake2b(json.dumps(compute_fingerprints(parts, every_image)).encode(), digest_size=16).hexdigest()


def _fingerprint(data: Dataset, every_image: bool) -> Fingerprint:
    return {
        "samples": len(data),
        "shape": list(data.sample_shape),
        "classes": list(data.classes),
        "present": (data.labels == PRESENT).sum(axis=0).tolist(),
        "unknown": (data.labels == UNKNOWN).sum(axis=0).tolist(),
        "labels": _hash_array(np.ascontiguousarray(data.labels)),
        "images": _hash_images(data, every_image),
    }


def _hash_images(data: Dataset, every_image: bool) -> str:
    """A hash of the samples in their order. Images that are decoded on demand have a key, which is used instead."""
    if (key := getattr(data.store, "key", None)) is not None:
        return hashlib.blake2b(str(key).encode() + data.rows.tobytes(), digest_size=16).hexdigest()
    size = int(np.prod(data.sample_shape)) * data.store.itemsize
    step = 1 if every_image else max(1, -(-len(data) * size // LARGEST_READ))
    chosen = np.arange(0, len(data), step)
    digest = hashlib.blake2b(digest_size=16)
    for start in range(0, len(chosen), IMAGES_AT_ONCE):
        digest.update(np.ascontiguousarray(data.samples(chosen[start : start + IMAGES_AT_ONCE])).tobytes())
    return digest.hexdigest()


def _hash_array(array: np.ndarray) -> str:
    return hashlib.blake2b(array.tobytes(), digest_size=16).hexdigest()


def describe_changes(before: dict[str, Fingerprint], now: dict[str, Fingerprint]) -> list[str]:
    """What changed, as sentences for people; empty if nothing changed."""
    found = []
    for part in sorted(before.keys() | now.keys()):
        if part not in now or part not in before:
            found.append(f"{part} data was added" if part in now else f"{part} data was removed")
            continue
        old, new = before[part], now[part]
        if old["samples"] != new["samples"]:
            found.append(f"the {part} data has {new['samples']} samples, not {old['samples']}")
        if old["classes"] != new["classes"]:
            removed = [f"{name} was removed" for name in old["classes"] if name not in new["classes"]]
            new_names = [f"{name} is new" for name in new["classes"] if name not in old["classes"]]
            words = [*removed, *new_names] or ["their order"]
            found.append(f"the classes of the {part} data changed ({', '.join(words[:5])})")
        elif old["labels"] != new["labels"] and old["samples"] == new["samples"]:
            found.append(f"labels of the {part} data changed ({_changed_counts(old, new)})")
        if old["shape"] != new["shape"]:
            found.append(f"the {part} samples are {new['shape']}, not {old['shape']}")
        elif old["images"] != new["images"] and old["samples"] == new["samples"]:
            found.append(f"images of the {part} data or their order changed")
    return found


def _changed_counts(old: Fingerprint, new: Fingerprint) -> str:
    moved = [
        f"{name}: {was} → {is_now} present"
        for name, was, is_now in zip(old["classes"], old["present"], new["present"], strict=True)
        if was != is_now
    ]
    if not moved:
        return "the number of positives per class is the same"
    return ", ".join(moved[:3]) + (f" and {len(moved) - 3} more classes" if len(moved) > 3 else "")
