"""The federation: who has which samples and annotates which classes. Both engines and every command stand on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll.data import annotate, participation, sources
from fedmll.data.dataset import UNKNOWN, Dataset, Splits
from fedmll.data.digest import Facts, facts_of
from fedmll.data.images.cache import Progress, silent
from fedmll.data.partition import Partition, partition
from fedmll.data.skew import skewed
from fedmll.data.targets import whole_groups
from fedmll.errors import ConfigError
from fedmll.experiment import Experiment
from fedmll.seeding import numpy_generator

HOLDOUT = 0.1  # the share that clients hold out where the source has no validation data
SMALL_IMAGES = 64  # pixels: up to these a ResNet has the stem made for CIFAR


@dataclass(frozen=True)
class Federation:
    experiment: Experiment  # with everything decided that its data decides
    train: Dataset  # of the clients: targets as they annotate them
    truth: NDArray[np.int8]  # targets as the source has them
    test: Dataset
    validation: Dataset  # the source's own, or what the clients hold out together
    held_out: Dataset  # what the clients hold out together, client after client
    held_out_owner: NDArray[np.int64]  # client of each held-out sample
    names: tuple[str, ...]
    samples: tuple[NDArray[np.int64], ...]  # training samples of each client
    annotated: NDArray[np.bool_]  # (clients, classes)
    allowed: NDArray[np.bool_]  # (clients, classes): what the partition lets a client show
    report: dict[str, int]  # samples that the partition's rules touched
    server: Dataset | None  # samples that the server holds (partition.server)
    source: Dataset  # all training data with its true targets, whoever has it
    pooled_rows: NDArray[np.int64]  # what an upper bound trains on: all of `source` that is not held out
    decided: Mapping[str, Any]  # `section.key`: what the data decides where an experiment leaves it open
    notes: tuple[str, ...] = ()  # what the user should know of how the data was read

    def of(self, experiment: Experiment) -> Federation:
        """The same data for another experiment (another method, other training)."""
        other = replace(self, experiment=experiment.settled(self.decided))
        other.__dict__["facts"] = self.facts  # the images are read once for all
        return other

    @cached_property
    def facts(self) -> dict[str, Facts]:
        """What the data is, to be recognised again."""
        parts = {"training": self.source, "test": self.test}
        return facts_of(parts if self.validation is self.held_out else parts | {"validation": self.validation})

    @cached_property
    def pooled(self) -> Dataset:
        return self.source.subset(self.pooled_rows)

    @property
    def evaluated(self) -> dict[str, Dataset]:
        """What the global model is measured on. Held-out data that is the validation data is predicted once."""
        found = {"test": self.test, "validation": self.validation}
        return found if self.held_out is self.validation else found | {"held-out": self.held_out}

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        return np.array([len(rows) for rows in self.samples])

    @cached_property
    def there(self) -> NDArray[np.int64]:
        """The clients that have data. Between machines some may not have come yet, or take no further part."""
        return np.flatnonzero(self.sizes)

    def participants(self, round: int) -> NDArray[np.int64]:
        """Drawn among those who are there; all of them where `count` is more."""
        setting, there = self.experiment.participation, self.there
        fewer = setting.count is not None and len(there) < setting.count <= len(self.names)
        chosen = participation.choose(
            self.sizes[there],
            round,
            self.experiment.seed,
            fraction=setting.fraction,
            count=len(there) if fewer else setting.count,
            sampling=setting.sampling,
        )
        return there[chosen]


def build(experiment: Experiment, progress: Progress = silent) -> Federation:
    """Load the data and divide it, all from the seed. The result's experiment says what the data decided."""
    splits = _load(experiment, progress)
    decided = _decided(splits)
    experiment = experiment.settled(decided)
    splits = _narrowed(experiment, splits)
    own, servers = _server_share(experiment, splits.train)
    clients_data = splits.train.subset(own)
    divided = divide(experiment, clients_data)
    if divided.looks is not None:
        clients_data, splits = _with_looks(splits, own, divided, progress)
    known = _annotated(experiment, divided, len(splits.train.classes))
    labels = divided.labels
    if not known.all():
        labels = labels.copy()
        for rows, row_known in zip(divided.clients, known, strict=True):
            labels[rows[:, None], np.flatnonzero(~row_known)[None, :]] = UNKNOWN
    if (
        divided.labels.min(initial=0) == UNKNOWN
    ):  # a class of which a client knows no label (a blank column) is not annotated
        known = known & np.array([(labels[rows] != UNKNOWN).any(0) for rows in divided.clients])
    train = clients_data.with_labels(labels)
    samples, held_out = _hold_out(experiment, divided, clients_data)
    held_rows = np.concatenate(held_out)
    held = train.subset(held_rows)
    return Federation(
        experiment,
        train,
        divided.labels,
        splits.test,
        held if splits.validation is None else splits.validation,
        held,
        np.repeat(np.arange(len(held_out)), [len(rows) for rows in held_out]),
        divided.names,
        samples,
        known,
        divided.allowed,
        divided.report,
        splits.train.subset(servers) if len(servers) else None,
        splits.train,
        np.setdiff1d(np.arange(len(splits.train)), own[held_rows]),
        decided,
        splits.notes,
    )


def _annotated(experiment: Experiment, divided: Partition, classes: int) -> NDArray[np.bool_]:
    setting = experiment.annotation
    if divided.annotated is None:
        return annotate.annotate(setting.kind, len(divided.clients), classes, experiment.seed, missing=setting.missing)
    if setting.kind != "none":
        raise ConfigError(f"annotation.kind = '{setting.kind}': partition.file says who annotates what. Leave it out.")
    return divided.annotated


def _with_looks(
    splits: Splits, own: NDArray[np.int64], divided: Partition, progress: Progress
) -> tuple[Dataset, Splits]:
    """The training data with the looks of its clients; what the server holds stays as it is."""
    assert divided.looks is not None
    train = skewed(splits.train, [own[rows] for rows in divided.clients], divided.looks, progress)
    return train.subset(own), replace(splits, train=train)


def decisions(shape: tuple[int, ...], has_validation: bool) -> dict[str, Any]:
    """What the data decides where the experiment leaves it open: how much is held out, which stem a ResNet has."""
    small = len(shape) == 3 and shape[1] <= SMALL_IMAGES
    return {
        "partition.holdout": 0.0 if has_validation else HOLDOUT,
        "model.stem": "cifar" if small else "imagenet",
    }


def _decided(splits: Splits) -> dict[str, Any]:
    """Also: natural clients or not, the images' size and their range."""
    found = decisions(splits.train.sample_shape, splits.validation is not None)
    found["partition.kind"] = "dirichlet" if splits.train.groups is None else "natural"
    if splits.size is not None:
        height, width = splits.size
        found["data.size"] = height if height == width else splits.size
    if splits.window is not None:
        found["data.window"] = splits.window
    if splits.group is not None:
        found["data.group"] = splits.group
    return found


def _load(experiment: Experiment, progress: Progress) -> Splits:
    data = experiment.data
    return sources.load(data.name, data.root, data.size, experiment.seed, data.composition, progress, data.reading)


def _server_share(experiment: Experiment, train: Dataset) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Which training samples are for the clients, and which are the server's own."""
    count = int(experiment.partition.server * len(train))
    if not count:
        return np.arange(len(train)), np.arange(0)
    shuffled = numpy_generator(experiment.seed, "server").permutation(len(train))
    return np.sort(shuffled[count:]), np.sort(shuffled[:count])


def divide(experiment: Experiment, train: Dataset) -> Partition:
    setting = experiment.partition
    return partition(
        train.labels,
        setting.kind,
        setting.clients,
        experiment.seed,
        beta=setting.beta,
        presence=setting.presence,
        outside=setting.outside,
        labels_per_client=setting.labels_per_client,
        minimum=setting.minimum or _default_minimum(experiment, len(train)),
        groups=train.patients if train.groups is None else train.groups,
        classes=train.classes,
        file=setting.file,
    )


def _default_minimum(experiment: Experiment, samples: int) -> int:
    """One batch, but never more than half of an even share: the minimum must not undo the skew that was asked for."""
    clients = experiment.partition.clients or 1
    return max(1, min(experiment.training.batch_size, samples // (2 * clients)))


def _hold_out(
    experiment: Experiment, divided: Partition, train: Dataset
) -> tuple[tuple[NDArray[np.int64], ...], list[NDArray[np.int64]]]:
    """Each client keeps a share of its samples for validation; a client with too few keeps none."""
    if divided.held_out is not None:
        pairs = zip(divided.clients, divided.held_out, strict=True)
        return tuple(np.setdiff1d(rows, held) for rows, held in pairs), list(divided.held_out)
    share, samples, held_out = float(experiment.partition.holdout), [], []
    if experiment.data.group is not None and train.patients is not None:
        return _hold_out_patients(experiment, divided, train.patients)
    for name, rows in zip(divided.names, divided.clients, strict=True):
        kept, held = split_off(rows, share, experiment.seed, name)
        samples.append(kept)
        held_out.append(held)
    return tuple(samples), held_out


def _hold_out_patients(
    experiment: Experiment, divided: Partition, patients: NDArray[np.str_]
) -> tuple[tuple[NDArray[np.int64], ...], list[NDArray[np.int64]]]:
    """A patient whom one client holds out is held out by every client: no other trains on his images."""
    share = float(experiment.partition.holdout)
    _, number = np.unique(patients, return_inverse=True)
    chosen = np.zeros(number.max(initial=0) + 1, dtype=bool)
    for name, rows in zip(divided.names, divided.clients, strict=True):
        free = rows[~chosen[number[rows]]]
        room = int(share * len(rows)) - (len(rows) - len(free))
        _, held = _split_off_patients(free, room, experiment.seed, name, patients)
        chosen[number[held]] = True
    parts = [(rows[~chosen[number[rows]]], rows[chosen[number[rows]]]) for rows in divided.clients]
    empty = next((name for name, (kept, _) in zip(divided.names, parts, strict=True) if not len(kept)), None)
    if empty is not None:
        raise ConfigError(
            f"partition.holdout = {share} leaves client {empty} nothing to train on: every one of its "
            f"'{experiment.data.group}' is held out by some client. Lower partition.holdout or partition.clients."
        )
    return tuple(kept for kept, _ in parts), [held for _, held in parts]


def split_off(
    rows: NDArray[np.int64], share: float, seed: int, name: str, patients: NDArray[np.str_] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What a client trains on and what it holds out: a function of the seed and its name, wherever it runs.

    With `patients` (one a sample of the whole data, not only of `rows`) all samples of a patient are on one side.
    """
    count = int(share * len(rows))
    if patients is not None:
        return _split_off_patients(rows, count, seed, name, patients)
    if not count:  # nothing to draw; a stream for each of 50,000 clients takes seconds
        return np.sort(rows), rows[:0]
    shuffled = numpy_generator(seed, "holdout", name).permutation(rows)
    return np.sort(shuffled[count:]), np.sort(shuffled[:count])


def _split_off_patients(
    rows: NDArray[np.int64], count: int, seed: int, name: str, patients: NDArray[np.str_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    _, number = np.unique(patients[rows], return_inverse=True)
    sizes = np.bincount(number)
    chosen, _ = whole_groups(numpy_generator(seed, "holdout", name).permutation(len(sizes)), sizes, count)
    held = np.isin(number, chosen)
    return np.sort(rows[~held]), np.sort(rows[held])


def _narrowed(experiment: Experiment, splits: Splits) -> Splits:
    """`data.top_classes` and `data.limit`."""
    keep, limit = experiment.data.top_classes, experiment.data.limit
    train, test, validation = splits.train, splits.test, splits.validation
    if keep is not None:
        if keep > len(train.classes):
            raise ConfigError(
                f"data.top_classes = {keep}, but {experiment.data.name} has {len(train.classes)} classes."
            )
        counts = (train.labels == 1).sum(0)
        columns = np.sort(np.argsort(-counts, kind="stable")[:keep])
        train, test = train.only(columns), test.only(columns)
        validation = None if validation is None else validation.only(columns)
    if limit is not None and limit < len(train):
        chosen = numpy_generator(experiment.seed, "limit").permutation(len(train))[:limit]
        train = train.subset(np.sort(chosen))
    return replace(splits, train=train, test=test, validation=validation)
