"""clients.npz: who had what, as the clients annotate it; nothing that the server of a real federation does not know."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import small

from fedmll.data import federation
from fedmll.errors import DataError
from fedmll.report.by_client import label_maps
from fedmll.report.runs import Run
from fedmll.report.study import Row, Study
from fedmll.running.clients import read_clients, write_clients


@pytest.fixture(scope="module")
def data() -> federation.Federation:
    return federation.build(small(annotation__kind="missing", annotation__missing=3))


def test_positives_are_those_that_the_client_annotates(data: federation.Federation, tmp_path: Path) -> None:
    write_clients(tmp_path / "clients.npz", data)
    kept = read_clients(tmp_path / "clients.npz")
    assert (kept.names, kept.classes) == (data.names, data.train.classes)
    assert kept.positives is not None and kept.positives.dtype == np.int32
    for client, rows in enumerate(data.samples):
        truth = (data.truth[rows] == 1).sum(0)
        assert kept.samples[client] == len(rows)
        assert kept.positives[client].tolist() == np.where(data.annotated[client], truth, 0).tolist()
    np.testing.assert_array_equal(kept.annotated, data.annotated)


def test_a_server_without_training_data_writes_no_positives(data: federation.Federation, tmp_path: Path) -> None:
    write_clients(tmp_path / "clients.npz", replace(data, train=data.train.subset(np.arange(0))))
    assert read_clients(tmp_path / "clients.npz").positives is None
    run = Run(tmp_path, "run", summary={"metrics": {}}, state="finished")
    chart = label_maps(Study("", [Row("fedavg", [run])]))
    assert chart is not None and "only the site knows" in chart.words
    assert [[value is None for value in line] for line in chart.sheets[0].values] == (~data.annotated).tolist()


def test_a_damaged_file_is_one_sentence(data: federation.Federation, tmp_path: Path) -> None:
    file = tmp_path / "clients.npz"
    write_clients(file, data)
    for content in (file.read_bytes()[:100], b"", b"no archive"):
        file.write_bytes(content)
        with pytest.raises(DataError, match=r"clients\.npz cannot be read"):
            read_clients(file)
