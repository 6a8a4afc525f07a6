"""Targets of sources as three values, random splits, and checks of training data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedmll.core.errors import DataError
from fedmll.core.seeding import numpy_generator
from fedmll.data.dataset import PRESENT, UNKNOWN, Dataset, Splits
from fedmll.data.images.problems import abbreviate

TRAIN, VALIDATION, TEST = 0, 1, 2
TEST_SHARE = 0.2  # fraction of the samples of a source without a split
SPLIT_SEED = 0  # of that split; independent of the experiment's seed
NAMED_CLASSES = 5
MOST_CLASSES = 25_000  # of class numbers without names; the largest published label sets have about 22,000


def one_hot(numbers: NDArray[np.integer], classes: int, where: str) -> NDArray[np.int8]:
    """Targets of samples with exactly one class each, given by class number."""
    wrong = np.flatnonzero((numbers < 0) | (numbers >= classes))
    if len(wrong):
        raise DataError(
            f"{where}: sample {wrong[0]} has the class number {numbers[wrong[0]]}; there are {classes} classes, "
            f"numbered from 0. Correct the number or the list of classes."
        )
    targets = np.zeros((len(numbers), classes), dtype=np.int8)
    targets[np.arange(len(numbers)), numbers] = PRESENT
    return targets


def parse_targets(labels: NDArray[np.generic], classes: tuple[str, ...], where: str) -> NDArray[np.int8]:
    """Targets from an array: one column per class with 1, 0 or -1 (unknown), or one class number per sample."""
    check_labels(labels, where)
    numbers = labels.astype(np.int64) if labels.dtype.kind == "b" else labels
    if numbers.ndim == 1:
        return one_hot(numbers, len(classes), where)  # type: ignore[arg-type]
    if numbers.shape[1] != len(classes):
        raise DataError(
            f"{where}: labels have the shape {numbers.shape}, and there are {len(classes)} classes. One row per "
            "sample and one column per class are needed, or one class number per sample."
        )
    wrong = np.argwhere((numbers < UNKNOWN) | (numbers > PRESENT))  # type: ignore[operator]
    if len(wrong):
        row, column = wrong[0]
        raise DataError(
            f"{where}: the label of sample {row} for class '{classes[column]}' is {numbers[row, column]}; it must be "
            "1 (present), 0 (absent) or -1 (unknown)."
        )
    return numbers.astype(np.int8)


def check_labels(labels: NDArray[np.generic], where: str) -> None:
    """Reject an array that cannot be labels, whatever the classes are."""
    if labels.dtype.kind not in "iub":
        raise DataError(f"{where}: labels must be whole numbers; they are {labels.dtype}. Store them as int8.")
    if labels.ndim not in (1, 2):
        raise DataError(
            f"{where}: labels have the shape {labels.shape}. One row per sample and one column per class are needed, "
            "or one class number per sample."
        )


def count_classes(labels: NDArray[np.generic], where: str) -> int:
    """The number of classes of labels without class names: columns, or the largest class number plus one."""
    check_labels(labels, where)
    if labels.ndim == 2:
        return labels.shape[1]
    largest = int(labels.max(initial=0))
    if largest >= MOST_CLASSES:
        raise DataError(
            f"{where}: sample {int(labels.argmax())} has the class number {largest}; class numbers go from 0 to "
            f"{MOST_CLASSES - 1:,}, without gaps. Renumber the classes."
        )
    return largest + 1


def draw_split(
    labels: NDArray[np.int8], patients: NDArray[np.str_] | None = None, test_share: float = TEST_SHARE
) -> NDArray[np.int8]:
    """Draw a split with a fifth (or `test_share`) of the samples in test, stratified by the rarest class of each sample
    (or patient).

    Stratification keeps most positives of a rare class in the training data. The split does not depend on the
    experiment's seed, so that different seeds are compared on the same test data.
    """
    generator = numpy_generator(SPLIT_SEED, "split")
    present = labels == PRESENT
    split = np.full(len(labels), TRAIN, dtype=np.int8)
    if patients is None:
        for members in _strata(present):
            shuffled = generator.permutation(members)
            split[shuffled[: int(len(members) * test_share + 0.5)]] = TEST
        return split
    names, patient_of = np.unique(patients, return_inverse=True)
    shown = np.zeros((len(names), labels.shape[1]), dtype=bool)
    np.logical_or.at(shown, patient_of, present)
    sizes = np.bincount(patient_of)
    room = 0.0  # carried over: a stratum may have too few patients for its share
    for members in _strata(shown):
        room += sizes[members].sum() * test_share
        chosen, room = choose_whole_groups(generator.permutation(members), sizes, room)
        split[np.isin(patient_of, chosen)] = TEST
    return split


def choose_whole_groups(
    candidates: NDArray[np.int64], sizes: NDArray[np.int64], room: float
) -> tuple[NDArray[np.int64], float]:
    """Choose groups, in this order, if at least half of the group fits into the remaining room; never all groups."""
    chosen = []
    for group in candidates[:-1]:
        if sizes[group] <= 2 * room:
            chosen.append(group)
            room -= sizes[group]
    return np.array(chosen, dtype=np.int64), room


def find_split_groups(split: NDArray[np.integer], patients: NDArray[np.str_]) -> list[str]:
    """The patients with samples in more than one part of a split."""
    pairs = np.unique(np.stack([np.unique(patients, return_inverse=True)[1], split]), axis=1)
    numbers, parts = np.unique(pairs[0], return_counts=True)
    return [str(name) for name in np.unique(patients)[numbers[parts > 1]]]


def describe_split_groups(names: Sequence[str], group: str | None) -> str:
    return (
        f"{len(names)} of '{group}' are in more than one part of the split: "
        f"{abbreviate([f'{name!r}' for name in names])}. "
        "Give all samples of each the same split, or leave out the split; a split is then drawn."
    )


def _strata(present: NDArray[np.bool_]) -> list[NDArray[np.int64]]:
    """The rows grouped by their rarest class; rows without a positive class form the last group."""
    positives = present.sum(axis=0)
    rarity = np.where(present, positives, len(present) + 1)
    rarest = np.where(present.any(axis=1), rarity.argmin(axis=1), present.shape[1])
    return [np.flatnonzero(rarest == stratum) for stratum in np.unique(rarest)]


def check_classes(classes: tuple[str, ...], where: str) -> None:
    if not classes:
        raise DataError(f"{where} has no classes. At least one is needed, with a label for each sample.")
    repeated = [name for name, count in Counter(classes).items() if count > 1]
    if repeated:
        raise DataError(
            f"{where}: the class '{repeated[0]}' appears twice. Each class needs one column with a unique name."
        )


def make_splits(
    samples: Dataset,
    split: NDArray[np.integer] | None,
    where: str,
    require_positives: bool = True,
    group: str | None = None,
) -> Splits:
    """Training, validation and test views of one dataset.

    Args:
        samples: all samples.
        split: 0 train, 1 validation, 2 test for each sample; None: draw a split.
        where: the name of the data, for error messages.
        require_positives: reject training data in which a class is never present.
        group: the name of the column `samples.patients`, if the samples of a patient must stay together.
    """
    places = draw_split(samples.labels, samples.patients if group else None) if split is None else split
    parts = [np.flatnonzero(places == code) for code in (TRAIN, VALIDATION, TEST)]
    if sum(map(len, parts)) != len(samples):
        wrong = int(np.flatnonzero((places < TRAIN) | (places > TEST))[0])
        raise DataError(
            f"{where}: sample {wrong} has the split {places[wrong]}; it must be 0 (train), 1 (validation) or 2 (test)."
        )
    if group is not None and samples.patients is not None:
        both = find_split_groups(places, samples.patients)
        if both:
            raise DataError(f"{where}: {describe_split_groups(both, group)}")
    for code, name in ((TRAIN, "training"), (TEST, "test")):
        if not len(parts[code]):
            advice = "Mark some samples as such" if split is not None else "Add samples (at least 3 per class)"
            if split is None and group is not None:
                advice = f"Add samples with other values of '{group}', or a split: a few values have most samples"
            raise DataError(f"{where}: there are no {name} samples among its {len(samples)}. {advice}.")
    train, validation, test = (samples.subset(part) if len(part) else None for part in parts)
    assert train is not None
    assert test is not None
    if require_positives:
        check_positives(train, where)
    return Splits(train, test, validation)


def check_positives(train: Dataset, where: str) -> None:
    """Reject training data in which a class has no positive sample: such a class cannot be learned."""
    present = (train.labels == PRESENT).any(axis=0)
    missing = [f"'{name}'" for name, any_present in zip(train.classes, present, strict=True) if not any_present]
    if missing:
        more = f" and {len(missing) - NAMED_CLASSES} more" if len(missing) > NAMED_CLASSES else ""
        raise DataError(
            f"{where}: no training sample has the class{'es' if len(missing) > 1 else ''} "
            f"{', '.join(missing[:NAMED_CLASSES])}{more} (not a single positive in {len(train)}). Remove the column, "
            "or add training samples of the class."
        )
