"""client_labels.npz: samples and annotated classes of each client, also at the server of a real federation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import small

from fedmll.comparison.compared_runs import ComparedRow, ComparedRuns
from fedmll.core.errors import DataError
from fedmll.data import federation
from fedmll.reports.charts import label_heatmaps
from fedmll.runs.array_files import read_client_labels, write_client_labels
from fedmll.runs.run_folder import RunFolder, RunState
from fedmll.runs.run_overview import RunRecord


@pytest.fixture(scope="module")
def data() -> federation.Federation:
    return federation.build(small(annotation__kind="missing", annotation__missing=3))


def test_positives_are_counted_as_the_client_annotates_them(data: federation.Federation, tmp_path: Path) -> None:
    write_client_labels(tmp_path / "client_labels.npz", data)
    kept = read_client_labels(tmp_path / "client_labels.npz")
    assert (kept.names, kept.classes) == (data.names, data.train.classes)
    assert kept.positives is not None and kept.positives.dtype == np.int32
    for client, rows in enumerate(data.samples):
        truth = (data.true_labels[rows] == 1).sum(0)
        assert kept.samples[client] == len(rows)
        assert kept.positives[client].tolist() == np.where(data.annotated[client], truth, 0).tolist()
    np.testing.assert_array_equal(kept.annotated, data.annotated)


def test_server_without_training_data_writes_no_positives(data: federation.Federation, tmp_path: Path) -> None:
    write_client_labels(tmp_path / "client_labels.npz", replace(data, train=data.train.subset(np.arange(0))))
    assert read_client_labels(tmp_path / "client_labels.npz").positives is None
    run = RunRecord(folder=RunFolder(tmp_path), name="run", summary={"metrics": {}}, state=RunState.FINISHED)
    chart = label_heatmaps(ComparedRuns(rows=[ComparedRow("fedavg", [run])]))
    assert chart is not None and "Only the site itself knows" in chart.caption
    assert [[value is None for value in line] for line in chart.heatmaps[0].values] == (~data.annotated).tolist()


def test_damaged_file_gives_an_error_of_one_sentence(data: federation.Federation, tmp_path: Path) -> None:
    file = tmp_path / "client_labels.npz"
    write_client_labels(file, data)
    for content in (file.read_bytes()[:100], b"", b"no archive"):
        file.write_bytes(content)
        with pytest.raises(DataError, match=r"client_labels\.npz cannot be read"):
            read_client_labels(file)
