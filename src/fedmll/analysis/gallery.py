"""The pictures that look inside one run: only what it has data for."""

from __future__ import annotations

from collections.abc import Iterator

from fedmll.analysis import attention, class_cosines, correlation_picture, coverage, examples, pseudo_labels
from fedmll.analysis.class_features import class_features, tsne
from fedmll.analysis.opened import check_fits
from fedmll.analysis.picture import Picture
from fedmll.data.dataset import Dataset
from fedmll.running.saved import SavedRun


def gallery(run: SavedRun, data: Dataset | None = None) -> list[Picture]:
    """From the files of the run; with `data` (its test data, see `opened.data_of`) also what needs the images, some of
    which are then shown."""
    found = [
        correlation_picture.picture(run),
        class_cosines.of_the_head(run),
        *pseudo_labels.pictures(run),
        coverage.of_run(run),
        *(() if data is None else _with_data(run, data)),
    ]
    return [picture for picture in found if picture is not None]


def _with_data(run: SavedRun, data: Dataset) -> Iterator[Picture | None]:
    check_fits(run, data)
    features = class_features(run, data)
    if features is not None:
        yield class_cosines.of_features(run, features)
        yield tsne(run, features)
    yield attention.picture(run, data)
    yield examples.picture(run, data)
