"""`Federation`: which client has which samples and annotates which classes. Every engine and every command uses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll.config.experiment import Experiment
from fedmll.config.settings import AUTO, SITES, ClientPartition
from fedmll.core.errors import ConfigError
from fedmll.core.seeding import numpy_generator
from fedmll.data import annotation, participation, sources
from fedmll.data.dataset import UNKNOWN, Dataset, Splits
from fedmll.data.fingerprint import Fingerprint, compute_fingerprints
from fedmll.data.images.cache import Progress, no_progress
from fedmll.data.partition import Partition, apply_feature_skew, partition
from fedmll.data.sites import join_partitions, load_sites, site_seed
from fedmll.data.targets import choose_whole_groups

HOLDOUT = 0.1  # the fraction that clients hold out if the source has no validation data
SMALL_IMAGES = 64  # pixels: up to this size a ResNet gets the CIFAR stem


@dataclass(frozen=True, kw_only=True)
class Federation:
    """An experiment's data, divided among clients.

    Attributes:
        experiment: the experiment, with every setting that the data determines.
        train: the clients' training data, with the targets that the clients annotate.
        true_labels: the targets of `train` as the source has them.
        test: the test data.
        validation: the source's validation data, or the samples that the clients hold out.
        held_out: the samples that the clients hold out, one client after the other.
        held_out_owners: the client of each held-out sample.
        names: the names of the clients.
        samples: the training samples of each client.
        annotated: (clients, classes) the classes that each client annotates.
        allowed: (clients, classes) the classes that the partition allows at each client.
        report: how many samples each rule of the partition affected.
        server: the samples that the server holds (`partition.server`).
        source: all training data with its true targets, whoever has it.
        pooled_rows: the rows of `source` that are not held out; a centralized upper bound trains on them.
        derived_settings: `section.key` → the value that the data determines if the experiment leaves it open.
        notes: messages for the user about how the data was read.
    """

    experiment: Experiment
    train: Dataset
    true_labels: NDArray[np.int8]
    test: Dataset
    validation: Dataset
    held_out: Dataset
    held_out_owners: NDArray[np.int64]
    names: tuple[str, ...]
    samples: tuple[NDArray[np.int64], ...]
    annotated: NDArray[np.bool_]
    allowed: NDArray[np.bool_]
    report: dict[str, int]
    server: Dataset | None
    source: Dataset
    pooled_rows: NDArray[np.int64]
    derived_settings: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    def with_experiment(self, experiment: Experiment) -> Federation:
        """The same data for another experiment (another method or other training settings)."""
        other = replace(self, experiment=experiment.settled(self.derived_settings))
        other.__dict__["fingerprints"] = self.fingerprints  # cached: the images are read only once
        return other

    @cached_property
    def fingerprints(self) -> dict[str, Fingerprint]:
        """Fingerprints of the training, test and validation data."""
        parts = {"training": self.source, "test": self.test}
        return compute_fingerprints(
            parts if self.validation is self.held_out else parts | {"validation": self.validation}
        )

    @cached_property
    def pooled(self) -> Dataset:
        return self.source.subset(self.pooled_rows)

    @property
    def evaluation_sets(self) -> dict[str, Dataset]:
        """The data on which the global model is evaluated; held-out data that is the validation data occurs once."""
        sets = {"test": self.test, "validation": self.validation}
        return sets if self.held_out is self.validation else sets | {"held-out": self.held_out}

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        return np.array([len(rows) for rows in self.samples])

    @cached_property
    def annotated_by_site(self) -> dict[str, NDArray[np.bool_]]:
        """With [[sites]]: site → (C,) the classes of which its training data has a label."""
        sites, labels = self.source.sites, self.source.labels
        names = [site.name for site in self.experiment.sites or ()]
        return {} if sites is None else {name: (labels[sites == name] != UNKNOWN).any(0) for name in names}

    @cached_property
    def active_clients(self) -> NDArray[np.int64]:
        """The clients with data. In a real federation some clients may not have joined yet, or may have left."""
        return np.flatnonzero(self.sizes)

    def participants(self, round: int) -> NDArray[np.int64]:
        """Draw the clients of a round from the active clients; all of them if `participation.count` is larger."""
        setting, active = self.experiment.participation, self.active_clients
        fewer = setting.count is not None and len(active) < setting.count <= len(self.names)
        chosen = participation.choose_clients(
            self.sizes[active],
            round,
            self.experiment.seed,
            fraction=setting.fraction,
            count=len(active) if fewer else setting.count,
            sampling=setting.sampling,
        )
        return active[chosen]


def data_key(experiment: Experiment) -> str:
    """The settings that the division of the data depends on."""
    parts = (experiment.data, experiment.partition, experiment.annotation, *(experiment.sites or ()))
    return f"{[p.model_dump_json() for p in parts]} {experiment.seed} {experiment.training.batch_size}"


def build(experiment: Experiment, progress: Progress = no_progress) -> Federation:
    """Load the data and divide it among clients.

    Everything follows from the experiment's seed. The result's experiment contains the settings that the data
    determines.
    """
    experiment = experiment.prepared()
    data = experiment.data
    if experiment.sites is not None:
        splits = load_sites(experiment, progress)
    else:
        splits = sources.load(
            data.name, data.root, data.size, experiment.seed, data.composition, progress, data.reading
        )
    derived = _derive_settings(splits)
    experiment = experiment.settled(derived)
    splits = _restrict(experiment, splits)
    own, servers = _split_off_server(experiment, splits.train)
    clients_data = splits.train.subset(own)
    divided = divide(experiment, clients_data)
    if divided.appearances is not None:  # the server's samples are not changed
        changed = [own[rows] for rows in divided.clients]
        splits = replace(splits, train=apply_feature_skew(splits.train, changed, divided.appearances, progress))
        clients_data = splits.train.subset(own)
    known = _annotated_classes(experiment, divided, len(splits.train.classes))
    labels = divided.labels
    if not known.all():
        labels = labels.copy()
        for rows, row_known in zip(divided.clients, known, strict=True):
            labels[rows[:, None], np.flatnonzero(~row_known)[None, :]] = UNKNOWN
    if divided.labels.min(initial=0) == UNKNOWN:
        # A client that knows no label of a class (a blank column) does not annotate this class.
        known = known & np.array([(labels[rows] != UNKNOWN).any(0) for rows in divided.clients])
    train = clients_data.with_labels(labels)
    samples, held_out = _hold_out(experiment, divided, clients_data)
    held_rows = np.concatenate(held_out)
    held = train.subset(held_rows)
    return Federation(
        experiment=experiment,
        train=train,
        true_labels=divided.labels,
        test=splits.test,
        validation=held if splits.validation is None else splits.validation,
        held_out=held,
        held_out_owners=np.repeat(np.arange(len(held_out)), [len(rows) for rows in held_out]),
        names=divided.names,
        samples=samples,
        annotated=known,
        allowed=divided.allowed,
        report=divided.report,
        server=splits.train.subset(servers) if len(servers) else None,
        source=splits.train,
        pooled_rows=np.setdiff1d(np.arange(len(splits.train)), own[held_rows]),
        derived_settings=derived,
        notes=splits.notes,
    )


def _annotated_classes(experiment: Experiment, divided: Partition, classes: int) -> NDArray[np.bool_]:
    kind, missing = experiment.annotation.kind, experiment.annotation.missing
    if divided.annotated is None:
        return annotation.annotate(kind, len(divided.clients), classes, experiment.seed, missing=missing)
    if kind != "none":
        raise ConfigError(
            f"annotation.kind = '{kind}': partition.file says which client annotates which classes. Leave it out."
        )
    return divided.annotated


def derive_settings(shape: tuple[int, ...], has_validation: bool) -> dict[str, Any]:
    """The held-out fraction and a ResNet's stem, which the data determines if the experiment leaves them open."""
    small = len(shape) == 3 and shape[1] <= SMALL_IMAGES
    return {
        "partition.holdout": 0.0 if has_validation else HOLDOUT,
        "model.stem": "cifar" if small else "imagenet",
    }


def _derive_settings(splits: Splits) -> dict[str, Any]:
    """Also the kind of partition, the size of the images and the range of their values."""
    found = derive_settings(splits.train.sample_shape, splits.validation is not None)
    found["partition.kind"] = "dirichlet" if splits.train.groups is None else "natural"
    if splits.train.sites is not None:
        found["partition.kind"] = SITES
    if splits.size is not None:
        height, width = splits.size
        found["data.size"] = height if height == width else splits.size
    found |= {"data.window": splits.window, "data.group": splits.group, "data.encoding": splits.encoding}
    return {name: value for name, value in found.items() if value is not None}


def _split_off_server(experiment: Experiment, train: Dataset) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The training samples of the clients, and those of the server."""
    count = int(experiment.partition.server * len(train))
    if not count:
        return np.arange(len(train)), np.arange(0)
    shuffled = numpy_generator(experiment.seed, "server").permutation(len(train))
    return np.sort(shuffled[count:]), np.sort(shuffled[:count])


def divide(experiment: Experiment, train: Dataset) -> Partition:
    if experiment.partition.kind == SITES and experiment.sites is not None:
        return _divide_sites(experiment, train)
    return _divide(experiment, experiment.partition, train, experiment.seed, experiment.partition.file)


def _divide(
    experiment: Experiment, setting: ClientPartition, train: Dataset, seed: int, file: Path | None = None
) -> Partition:
    # By default one batch, but at most half of an equal share: the minimum must not undo the requested skew.
    minimum = max(1, min(experiment.training.batch_size, len(train) // (2 * (setting.clients or 1))))
    return partition(
        train.labels,
        setting.kind,
        setting.clients,
        seed,
        beta=setting.beta,
        presence=setting.presence,
        unassignable=setting.unassignable,
        labels_per_client=setting.labels_per_client,
        minimum=setting.minimum or minimum,
        groups=train.patients if train.groups is None else train.groups,
        classes=train.classes,
        file=file,
    )


def _divide_sites(experiment: Experiment, train: Dataset) -> Partition:
    """Divide the samples of each site among its own clients. A site without a partition is one client."""
    parts = {}
    for site in experiment.sites or ():
        rows = np.flatnonzero(train.sites == site.name)
        if not len(rows):
            raise ConfigError(f"[[sites]] '{site.name}' has no training samples left. Raise data.limit.")
        columns = np.flatnonzero((train.labels[rows] != UNKNOWN).any(0))
        own = train.subset(rows).select_classes(columns)
        setting = site.partition or ClientPartition(kind="iid", clients=1)
        if setting.kind == AUTO:
            named = own.groups is not None and bool((own.groups != "").all())
            setting = setting.model_copy(update={"kind": "natural" if named else "dirichlet"})
        if setting.clients is None and setting.kind != "natural":
            raise ConfigError(f"[[sites]] '{site.name}': its partition needs the number of clients (clients = …).")
        try:
            found = _divide(experiment, setting, own, site_seed(experiment.seed, site.name))
        except ConfigError as error:
            raise ConfigError(f"[[sites]] '{site.name}': {error}") from error
        parts[site.name] = (rows, columns, found)
    return join_partitions(train.labels, parts)


# Held-out data


def _hold_out(
    experiment: Experiment, divided: Partition, train: Dataset
) -> tuple[tuple[NDArray[np.int64], ...], list[NDArray[np.int64]]]:
    """Hold out a fraction of each client's samples for validation; a client with too few samples holds out none.

    With `data.group`, a patient held out by one client is held out by all, so that no client trains on the patient.
    """
    share, names = float(experiment.partition.holdout), divided.names
    if divided.held_out is not None:
        parts = [(np.setdiff1d(rows, held), held) for rows, held in zip(divided.clients, divided.held_out, strict=True)]
    elif train.patients is None or (experiment.data.group is None and experiment.sites is None):
        clients = zip(names, divided.clients, strict=True)
        parts = [split_holdout(rows, share, experiment.seed, name) for name, rows in clients]
    else:
        _, number = np.unique(train.patients, return_inverse=True)
        chosen = np.zeros(number.max(initial=0) + 1, dtype=bool)
        for name, rows in zip(names, divided.clients, strict=True):
            free = rows[~chosen[number[rows]]]
            room = int(share * len(rows)) - (len(rows) - len(free))
            _, held = _split_off_patients(free, room, experiment.seed, name, train.patients)
            chosen[number[held]] = True
        parts = [(rows[~chosen[number[rows]]], rows[chosen[number[rows]]]) for rows in divided.clients]
        empty = next((name for name, (kept, _) in zip(names, parts, strict=True) if not len(kept)), None)
        if empty is not None:
            group = experiment.data.group or "patient"
            raise ConfigError(
                f"partition.holdout = {share} leaves client {empty} without training samples: some client holds out "
                f"each '{group}' that it has. Lower partition.holdout or partition.clients."
            )
    return tuple(kept for kept, _ in parts), [held for _, held in parts]


def split_holdout(
    rows: NDArray[np.int64], share: float, seed: int, name: str, patients: NDArray[np.str_] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Divide a client's samples into training samples and held-out samples, by the seed and the client's name.

    Args:
        rows: the client's samples.
        share: the fraction to hold out.
        seed: the experiment's seed.
        name: the client's name.
        patients: the patient of each sample of the whole data (not only of `rows`); all samples of a patient then stay
            on one side.

    Returns:
        The training samples and the held-out samples, both sorted.
    """
    count = int(share * len(rows))
    if patients is not None:
        return _split_off_patients(rows, count, seed, name, patients)
    if not count:  # no draw: 50,000 random generators would take seconds
        return np.sort(rows), rows[:0]
    shuffled = numpy_generator(seed, "holdout", name).permutation(rows)
    return np.sort(shuffled[count:]), np.sort(shuffled[:count])


def _split_off_patients(
    rows: NDArray[np.int64], count: int, seed: int, name: str, patients: NDArray[np.str_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    _, number = np.unique(patients[rows], return_inverse=True)
    sizes = np.bincount(number)
    chosen, _ = choose_whole_groups(numpy_generator(seed, "holdout", name).permutation(len(sizes)), sizes, count)
    held = np.isin(number, chosen)
    return np.sort(rows[~held]), np.sort(rows[held])


def _restrict(experiment: Experiment, splits: Splits) -> Splits:
    """Apply `data.top_classes` and `data.limit`."""
    keep, limit = experiment.data.top_classes, experiment.data.limit
    train, test, validation = splits.train, splits.test, splits.validation
    if keep is not None:
        if keep > len(train.classes):
            raise ConfigError(
                f"data.top_classes = {keep}, but {experiment.data.name} has {len(train.classes)} classes."
            )
        counts = (train.labels == 1).sum(0)
        columns = np.sort(np.argsort(-counts, kind="stable")[:keep])
        train, test = train.select_classes(columns), test.select_classes(columns)
        validation = None if validation is None else validation.select_classes(columns)
    if limit is not None and limit < len(train):
        chosen = numpy_generator(experiment.seed, "limit").permutation(len(train))[:limit]
        train = train.subset(np.sort(chosen))
    return replace(splits, train=train, test=test, validation=validation)
