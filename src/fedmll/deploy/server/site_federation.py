"""The Federation as the server knows it: its own test data, the sizes and classes of the sites that have joined.

The server has no sample of a site. A site that has not joined, or takes no further part, has no samples and no classes;
it only keeps its index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from fedmll.config.experiment import Experiment
from fedmll.config.settings import NO_DATA
from fedmll.core.errors import ConfigError, DataError
from fedmll.data import sources
from fedmll.data.dataset import Dataset
from fedmll.data.federation import Federation
from fedmll.data.images.labels_csv import read_labels
from fedmll.data.sources.labelled_images import decode_table
from fedmll.data.targets import TEST, TRAIN
from fedmll.deploy.error_codes import JoinRejected, RejectionCode
from fedmll.deploy.introduction import Introduction
from fedmll.deploy.server.server_settings import ServerSettings
from fedmll.engines.client_trainer import Trainer
from fedmll.methods.framework.client_round import ClientInfo
from fedmll.training.callbacks import Callback

Introductions = Mapping[str, Introduction]  # by name


@dataclass(frozen=True)
class ServerData:
    """What the server itself has."""

    test: Dataset  # the test images. Without any it is empty, but has the classes and the shape of the images.
    unlabelled: Dataset | None  # images without labels, for methods that use them


def load_server_data(experiment: Experiment, callback: Callback) -> ServerData:
    """Load what the experiment names as the server's data."""
    data = experiment.data
    if experiment.sites is not None:
        raise ConfigError(
            "[[sites]] describes a simulation; in a real federation each site reads its own data. Give the server's "
            "own test data with data.name, or data.name = 'none' and [study]."
        )
    if data.name == NO_DATA:
        if experiment.study is None or not experiment.study.classes or data.size is None:
            raise ConfigError(
                "data.name = 'none' is for a server without test data. The experiment must then say what the clients "
                "have: study.classes = ['…', '…'] and data.size (and study.channels = 1 for grey images)."
            )
        height, width = (data.size, data.size) if isinstance(data.size, int) else data.size
        store = np.zeros((0, experiment.study.channels or 3, height, width), np.uint8)
        classes = experiment.study.classes
        return ServerData(Dataset(store, np.zeros((0, len(classes)), np.int8), classes), None)
    if data.name.startswith("folder:"):
        file = Path(data.name.partition(":")[2]).expanduser()
        table = read_labels(file, data.root or file.parent, data.reading)
        found = decode_table(table, data.size, data.reading, callback.on_setup_progress)
        for note in found.notes:
            callback.on_warning(note)
        samples = Dataset(found.store, found.table.labels, found.table.classes, found.rows)
        split = np.full(len(samples), TEST) if found.table.split is None else found.table.split
        test, train = (samples.subset(np.flatnonzero(split == side)) for side in (TEST, TRAIN))
        if not len(test):
            raise DataError(f"The server's own data, {data.name}, has no row with split = test.")
        return ServerData(test, train if len(train) else None)
    splits = sources.load(
        data.name, data.root, data.size, experiment.seed, data.composition, callback.on_setup_progress, data.reading
    )
    for note in splits.notes:
        callback.on_warning(note)
    return ServerData(splits.test, None)


def build_federation(
    experiment: Experiment, settings: ServerSettings, introductions: Introductions, data: ServerData
) -> Federation:
    """The federation with the server's own data. Validators have an index and no samples."""
    test = data.test
    classes, names = test.classes, settings.all_names
    nothing = Dataset(test.store[:0], np.zeros((0, len(classes)), np.int8), classes, np.zeros(0, np.int64))
    federation = Federation(
        experiment=experiment,
        train=nothing,
        true_labels=nothing.labels,
        test=test,
        validation=nothing,
        held_out=nothing,
        held_out_owners=np.zeros(0, np.int64),
        names=names,
        samples=(),
        annotated=np.zeros((len(names), len(classes)), bool),
        allowed=np.ones((len(names), len(classes)), bool),
        report={},
        server=data.unlabelled,
        source=nothing,
        pooled_rows=np.zeros(0, np.int64),
        derived_settings={},
    )
    clients = {name: each for name, each in introductions.items() if name in settings.clients}
    return with_introductions(federation, clients)


def with_introductions(federation: Federation, introductions: Introductions) -> Federation:
    """A copy with the sizes and classes of these clients, and of no others."""
    classes = federation.test.classes
    annotated = [
        [name in introductions and label in introductions[name].classes for label in classes]
        for name in federation.names
    ]
    counts = [introductions[name].samples if name in introductions else 0 for name in federation.names]
    samples = tuple(np.broadcast_to(np.int64(0), count) for count in counts)  # occupies no memory
    return replace(federation, samples=samples, annotated=np.array(annotated))


def client_infos(trainer: Trainer, federation: Federation, introductions: Introductions) -> list[ClientInfo]:
    """The clients with these introductions, as the method knows them."""
    clients = trainer.client_infos(with_introductions(federation, introductions))
    return [client for client in clients if client.name in introductions]


def validator_infos(
    federation: Federation, validators: Sequence[str], introductions: Introductions
) -> list[ClientInfo]:
    """The validators that have joined."""
    classes = federation.test.classes
    return [
        ClientInfo(index, name, torch.tensor([label in introductions[name].classes for label in classes]))
        for index, name in enumerate(federation.names)
        if name in validators and name in introductions
    ]


def check_newcomer(trainer: Trainer, federation: Federation, introductions: Introductions) -> None:
    """Raise JoinRejected if the method cannot work with these clients, of which one joins during the run.

    The same problem would end the start of a run, but it must not end a run that has begun.
    """
    training = {name: each for name, each in introductions.items() if each.samples}
    try:
        trainer.method.validate_clients(client_infos(trainer, federation, training))
    except ConfigError as error:
        raise JoinRejected(RejectionCode.OTHER, f"the method cannot work with it: {error}") from None


def describe_missing_clients(
    federation: Federation, clients: Sequence[str], introductions: Introductions
) -> str | None:
    """For the operator, if the run starts before all clients have joined: which are missing, and which classes."""
    missing = [name for name in clients if name not in introductions]
    unknown = np.array(federation.test.classes)[~federation.annotated.any(axis=0)]
    classes = f"; no client annotates {', '.join(unknown)} so far" if len(unknown) else ""
    return f"starts without {', '.join(missing)}, which may join later{classes}" if missing else None
