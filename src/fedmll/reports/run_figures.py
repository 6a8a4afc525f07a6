"""The figures that look inside the model of one run. Images of the data are only shown on request."""

from __future__ import annotations

from collections.abc import Iterator

from fedmll.core.errors import FedmllError
from fedmll.data.dataset import Dataset
from fedmll.inference.load import SavedRun, load_run
from fedmll.reports.figure import ReportFigure
from fedmll.reports.figures import (
    attention,
    class_features,
    class_similarity,
    example_predictions,
    label_correlation,
    label_coverage,
    mistakes,
    pseudo_labels,
)
from fedmll.runs.run_overview import RunRecord


def model_figures(run: SavedRun, data: Dataset | None = None) -> list[ReportFigure]:
    """All figures that a run has the numbers for.

    Args:
        run: A finished run.
        data: Its test data (`run.load_test_data()`). With it there are also figures that need the images, and some of
            these show images.
    """
    figures = [
        label_correlation.correlation_figure(run),
        class_similarity.class_vector_figure(run),
        *pseudo_labels.pseudo_label_figures(run),
        label_coverage.coverage_figure(run),
        *(() if data is None else _figures_with_data(run, data)),
    ]
    return [figure for figure in figures if figure is not None]


def _figures_with_data(run: SavedRun, data: Dataset) -> Iterator[ReportFigure | None]:
    run.check_test_data(data)
    features = class_features.compute_class_features(run, data)
    if features is not None:
        yield class_similarity.class_feature_figure(run, features)
        yield class_features.tsne_figure(run, features)
    yield attention.attention_figure(run, data)
    yield example_predictions.example_figure(run, data)


def run_figures(run: RunRecord, images: bool) -> list[ReportFigure]:
    """The figures of a finished run, for the report. The reason for a missing figure is added to `run.damaged`.
    Plug-ins that the folder names are not executed, so a run that needs one has no figures of its model."""
    path = run.folder.path
    try:
        saved = load_run(path, plugins=())
        data = saved.load_test_data() if images else None
    except FedmllError as error:
        run.damaged.append(f"images of the data are not shown: {error}")
        saved, data = load_run(path, plugins=()), None
    figures: list[ReportFigure] = []
    try:
        figures += model_figures(saved, data)
        if data is not None and len(data.sample_shape) == 3:
            figures.append(mistakes.mistake_figure(saved))
    except FedmllError as error:
        run.damaged.append(f"figures of the model are missing: {error}")
    return figures
