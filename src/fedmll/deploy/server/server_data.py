"""The server's own data: test images and unlabelled images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedmll.config.experiment import Experiment
from fedmll.config.settings import NO_DATA
from fedmll.core.errors import ConfigError, DataError
from fedmll.data import sources
from fedmll.data.dataset import Dataset
from fedmll.deploy.site import site_data
from fedmll.training.callbacks import Callback


@dataclass(frozen=True)
class ServerData:
    """What the server itself has.

    Attributes:
        test: the test images. Without any it is empty, but has the classes and the shape of the images.
        unlabelled: images without labels, for methods that use them.
    """

    test: Dataset
    unlabelled: Dataset | None


def load_data_of_server(experiment: Experiment, callback: Callback) -> ServerData:
    """Load what the experiment names as the server's data."""
    data = experiment.data
    if data.name == NO_DATA:
        if experiment.sites is None or data.size is None:
            raise ConfigError(
                "data.name = 'none' is for a server without test data. The experiment must then say what the clients "
                "have: sites.classes = ['…', '…'] and data.size (and sites.channels = 1 for grey images)."
            )
        height, width = (data.size, data.size) if isinstance(data.size, int) else data.size
        store = np.zeros((0, experiment.sites.channels, height, width), np.uint8)
        classes = experiment.sites.classes
        return ServerData(Dataset(store, np.zeros((0, len(classes)), np.int8), classes), None)
    if data.name.startswith("folder:"):
        file = Path(data.name.partition(":")[2]).expanduser()
        test, train, table = site_data.load_server_data(
            file, data.root, data.size, data.reading, callback.on_setup_progress
        )
        for note in table.notes:
            callback.on_warning(note)
        if not len(test):
            raise DataError(f"The server's own data, {data.name}, has no row with split = test.")
        return ServerData(test, train if len(train) else None)
    splits = sources.load(
        data.name, data.root, data.size, experiment.seed, data.composition, callback.on_setup_progress, data.reading
    )
    for note in splits.notes:
        callback.on_warning(note)
    return ServerData(splits.test, None)
