"""Targets as sources give them, made three-valued; splits; and what training data must have."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedmll.data.dataset import PRESENT, UNKNOWN, Dataset, Splits
from fedmll.errors import DataError
from fedmll.seeding import numpy_generator

TRAIN, VALIDATION, TEST = 0, 1, 2
TEST_SHARE = 0.2  # of the samples of a source that comes without a split
NAMED_CLASSES = 5


def one_hot(numbers: NDArray[np.integer], classes: int, where: str) -> NDArray[np.int8]:
    """Targets of samples that have one class each, given by its number."""
    wrong = np.flatnonzero((numbers < 0) | (numbers >= classes))
    if len(wrong):
        raise DataError(
            f"{where}: sample {wrong[0]} has the class number {numbers[wrong[0]]}, and there are {classes} classes, "
            f"numbered from 0. Correct the number or the list of classes."
        )
    targets = np.zeros((len(numbers), classes), dtype=np.int8)
    targets[np.arange(len(numbers)), numbers] = PRESENT
    return targets


def three_valued(labels: NDArray[np.generic], classes: tuple[str, ...], where: str) -> NDArray[np.int8]:
    """Targets from a stored array: one column a class with 1, 0 or -1 (unknown), or one class number a sample."""
    if labels.dtype.kind not in "iub":
        raise DataError(f"{where}: labels must be whole numbers; they are {labels.dtype}. Store them as int8.")
    numbers = labels.astype(np.int64) if labels.dtype.kind == "b" else labels
    if numbers.ndim == 1:
        return one_hot(numbers, len(classes), where)  # type: ignore[arg-type]
    if numbers.ndim != 2 or numbers.shape[1] != len(classes):
        raise DataError(
            f"{where}: labels have the shape {numbers.shape}, and there are {len(classes)} classes. One row a sample "
            "and one column a class are needed, or one class number a sample."
        )
    wrong = np.argwhere((numbers < UNKNOWN) | (numbers > PRESENT))  # type: ignore[operator]
    if len(wrong):
        row, column = wrong[0]
        raise DataError(
            f"{where}: the label of sample {row} for class '{classes[column]}' is {numbers[row, column]}; it must be "
            "1 (present), 0 (absent) or -1 (unknown)."
        )
    return numbers.astype(np.int8)


def split_at_random(labels: NDArray[np.int8], seed: int) -> NDArray[np.int8]:
    """A seeded split with a fifth of the samples in test, stratified by each sample's rarest class.

    So a class with very few positives keeps them in training instead of losing them to chance.
    """
    present = labels == PRESENT
    positives = present.sum(axis=0)
    rarity = np.where(present, positives, len(labels) + 1)
    rarest = np.where(present.any(axis=1), rarity.argmin(axis=1), labels.shape[1])
    generator = numpy_generator(seed, "split")
    split = np.full(len(labels), TRAIN, dtype=np.int8)
    for stratum in np.unique(rarest):
        members = generator.permutation(np.flatnonzero(rarest == stratum))
        split[members[: int(len(members) * TEST_SHARE + 0.5)]] = TEST
    return split


def check_classes(classes: tuple[str, ...], where: str) -> None:
    repeated = next((name for name in classes if classes.count(name) > 1), None)
    if repeated is not None:
        raise DataError(
            f"{where}: the class '{repeated}' appears twice. Every class needs one column and its own name."
        )


def splits_of(
    samples: Dataset, split: NDArray[np.integer] | None, seed: int, where: str, require_positives: bool = True
) -> Splits:
    """Training, validation and test views of one dataset, by `split` (0, 1, 2) or, without one, at random by seed."""
    places = split_at_random(samples.labels, seed) if split is None else split
    parts = [np.flatnonzero(places == code) for code in (TRAIN, VALIDATION, TEST)]
    if sum(map(len, parts)) != len(samples):
        wrong = int(np.flatnonzero((places < TRAIN) | (places > TEST))[0])
        raise DataError(
            f"{where}: sample {wrong} has the split {places[wrong]}; it must be 0 (train), 1 (validation) or 2 (test)."
        )
    for code, name in ((TRAIN, "training"), (TEST, "test")):
        if not len(parts[code]):
            advice = "Mark some samples as such" if split is not None else "Add samples: at least 3 a class are needed"
            raise DataError(f"{where}: there are no {name} samples among its {len(samples)}. {advice}.")
    train, validation, test = (samples.subset(part) if len(part) else None for part in parts)
    assert train is not None
    assert test is not None
    if require_positives:
        check_positives(train, where)
    return Splits(train, test, validation)


def check_positives(train: Dataset, where: str) -> None:
    """A class that training never shows cannot be learnt: say so before the training, not after."""
    missing = [
        name
        for name, any_present in zip(train.classes, (train.labels == PRESENT).any(axis=0), strict=True)
        if not any_present
    ]
    if not missing:
        return
    named = ", ".join(f"'{name}'" for name in missing[:NAMED_CLASSES])
    more = f" and {len(missing) - NAMED_CLASSES} more" if len(missing) > NAMED_CLASSES else ""
    raise DataError(
        f"{where}: no training sample shows the class{'es' if len(missing) > 1 else ''} {named}{more} (not a single "
        f"positive in {len(train)}). Remove the column, or add samples that show it to the training data."
    )
