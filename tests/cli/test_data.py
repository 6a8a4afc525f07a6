"""fedmll data list, check, show, get: published datasets at the command line."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import official_datasets as official
import pytest
from PIL import Image
from typer.testing import CliRunner

from fedmll.cli.main import app
from fedmll.core import registry
from fedmll.core.errors import ConfigError, DataError
from fedmll.data import sources
from fedmll.data.dataset import Dataset, Splits
from fedmll.data.sources import load
from fedmll.data.sources.base import DownloadableFile, Source
from fedmll.reports.figures import image_sheets, label_statistics


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDMLL_CACHE", str(tmp_path / "cache"))


def tell(*words: str | Path) -> Any:
    return CliRunner().invoke(app, [*map(str, words)])


def test_data_list_shows_classes_samples_licence_and_availability(tmp_path: Path) -> None:
    official.voc2007(tmp_path)
    lines = {
        line.split("│")[1].strip(): line
        for line in tell("data", "list", "--root", tmp_path).stdout.splitlines()
        if "│" in line
    }
    assert [cell.strip() for cell in lines["voc:2007"].split("│")[3:-1]] == ["20", "9,963", "Flickr's terms", "yes"]
    assert lines["coco:2017"].split("│")[-2].strip() == "no"
    assert "1628" in lines["flair:fine"] and "ml-voc:2007" not in lines and "ml-ham10000" in lines


def test_data_check_compares_counts_with_the_published_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    official.voc2007(tmp_path)
    said = tell("data", "check", "voc:2007", "--root", tmp_path)
    assert said.exit_code == 1
    assert "train: 5,009 samples missing" in said.stdout and "test: 4,950 samples missing" in said.stdout
    assert "20 classes; in training: dog 2" in said.stdout
    source = registry.find("source", "voc")
    monkeypatch.setitem(source.published, "2007", {"train": 2, "test": 2})
    said = tell("data", "check", "voc:2007", "--root", tmp_path)
    assert said.exit_code == 0 and "complete: all counts are as published" in said.stdout
    said = tell("data", "check", "voc:2012", "--root", tmp_path)
    assert isinstance(said.exception, DataError) and "Expected: the folder VOCdevkit/VOC2012/" in str(said.exception)
    said = tell("data", "check", "voc:2007", "--root", tmp_path, "--set", "seed=1")
    assert isinstance(said.exception, ConfigError)


def test_counts_of_datasets_without_a_split_include_both_parts() -> None:
    splits = load("digits")
    assert sources.compare_counts("digits", splits) == [sources.SampleCount("train and test", 1797, 1797)]
    assert [count.published for count in sources.compare_counts("ml-digits", splits)] == [None, None]
    assert not sources.SampleCount("train", 3, 4).agrees


def test_data_show_draws_images_with_labels(tmp_path: Path) -> None:
    official.chest(tmp_path)
    out = tmp_path / "sheet.png"
    said = tell("data", "show", "chestxray14", "--root", tmp_path, "--out", out, "--count", 3)
    assert said.exit_code == 0, said.exception
    sheet = np.asarray(Image.open(out).convert("L"))
    assert all((sheet == official.shade(number)).sum() > 10_000 for number in range(3))  # each as large as its tile
    assert isinstance(tell("data", "show", "digits", "--split", "validation").exception, ConfigError)
    assert isinstance(tell("data", "show", "digits", "--split", "all").exception, ConfigError)


def test_text_below_an_image() -> None:
    data = Dataset(
        np.zeros((3, 1, 2, 2), np.uint8), np.array([[1, 0, 1], [0, 0, 0], [-1, 1, -1]], np.int8), tuple("abc")
    )
    assert [image_sheets.describe_sample(data, k) for k in range(3)] == ["a, c", "–", "b (2 unknown)"]
    assert (
        image_sheets.choose_positions(data, 2, 1) == image_sheets.choose_positions(data, 2, 1)
        and len(image_sheets.choose_positions(data, 9, 0)) == 3
    )


def test_cardinality_and_co_occurrence_agree_with_numpy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(label_statistics, "ROWS_AT_ONCE", 7)
    rng = np.random.default_rng(0)
    targets = rng.choice(np.array([-1, 0, 1], np.int8), (50, 5), p=[0.1, 0.5, 0.4])
    found = label_statistics.label_statistics(targets)
    positive = (targets == 1).astype(int)
    assert np.array_equal(found.co_occurrence, positive.T @ positive)
    assert np.array_equal(found.sizes, np.bincount(positive.sum(1)))
    assert found.cardinality == pytest.approx(positive.sum(1).mean())
    assert found.unknown == (
        targets == -1
    ).sum() and f"{found.unknown} targets unknown" in label_statistics.describe_labels(found)
    share = found.conditional_frequency()
    assert share[1, 3] == pytest.approx(positive[positive[:, 1] == 1, 3].mean())
    one, other, count = found.frequent_pairs("abcde", 1)[0]
    assert count == (found.co_occurrence - np.diag(np.diag(found.co_occurrence))).max() and (one, other) < (other, one)
    label_statistics.write_co_occurrence(tmp_path / "together.png", found, "abcde")
    assert Image.open(tmp_path / "together.png").size[0] > 200
    empty = label_statistics.label_statistics(np.zeros((2, 3), np.int8))
    assert (
        empty.frequent_pairs("abc", 5) == []
        and np.isnan(empty.conditional_frequency()).all()
        and empty.cardinality == 0
    )


# Downloads, from a server on this machine


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    folder = tmp_path / "published"
    folder.mkdir()
    quiet = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(quiet, directory=str(folder)))
    Thread(target=server.serve_forever, daemon=True).start()
    yield folder, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def offer(monkeypatch: pytest.MonkeyPatch, *files: DownloadableFile) -> None:
    source = Source(
        description="a test's",
        load=lambda request: Splits(None, None),  # type: ignore[arg-type]
        available=lambda root: True,
        downloads={"": files},
    )
    monkeypatch.setitem(registry._registered["source"], "offered", source)


def test_data_get_downloads_checks_and_unpacks(
    tmp_path: Path, site: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, url = site
    with tarfile.open(folder / "data.tar", "w") as archive:
        info = tarfile.TarInfo("inside/labels.csv")
        info.size = 3
        archive.addfile(info, io.BytesIO(b"abc"))
    (folder / "plain.npz").write_bytes(b"plain")
    md5 = "md5:" + hashlib.md5((folder / "data.tar").read_bytes()).hexdigest()
    sha = hashlib.sha256(b"plain").hexdigest()
    offer(monkeypatch, DownloadableFile(f"{url}/data.tar", md5), DownloadableFile(f"{url}/plain.npz?download=1", sha))
    root = tmp_path / "root"
    said = tell("data", "get", "offered", "--root", root)
    assert said.exit_code == 0, said.exception
    assert (root / "inside" / "labels.csv").read_bytes() == b"abc" and (root / "plain.npz").read_bytes() == b"plain"
    assert "data.tar was downloaded, with the published hash; unpacked" in said.stdout
    assert "plain.npz exists already" in tell("data", "get", "offered", "--root", root).stdout


def test_data_get_errors(tmp_path: Path, site: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, url = site
    (folder / "data.tar").write_bytes(b"changed")
    offer(monkeypatch, DownloadableFile(f"{url}/data.tar", "md5:" + "0" * 32))
    error = str(tell("data", "get", "offered", "--root", tmp_path).exception)
    assert "is not the published file: its md5 begins with" in error
    offer(monkeypatch, DownloadableFile("http://127.0.0.1:9/data.tar", "md5:" + "0" * 32))
    error = str(tell("data", "get", "offered", "--root", tmp_path).exception)
    assert "cannot be downloaded" in error and "Without a network: download the file on another machine" in error
    error = str(tell("data", "get", "chexpert", "--root", tmp_path).exception)
    assert "cannot be downloaded by this command (Stanford's research agreement)" in error and "voc:2007" in error
    offer(monkeypatch, DownloadableFile(f"{url}/data.tar", "md5:" + hashlib.md5(b"changed").hexdigest()))
    error = str(tell("data", "get", "offered", "--root", tmp_path).exception)
    assert "cannot be unpacked" in error


def test_published_hashes_are_well_formed() -> None:
    for name, source in registry.all_of("source").items():
        for argument, files in source.downloads.items():
            for file in files:
                kind, _, digest = file.digest.partition(":")
                assert kind == "md5" and len(digest) == 32 and int(digest, 16), name
                assert argument in source.variants or source.file or not argument
                assert "/" not in file.file and "?" not in file.file


def test_impossible_setting_of_data_check_is_explained() -> None:
    said = tell("data", "check", "digits", "--set", "data.size=-1")
    assert isinstance(said.exception, ConfigError) and "data.size" in str(said.exception)


def test_co_occurrence_of_the_largest_clients_is_beside_that_of_all(tmp_path: Path) -> None:
    """One panel for all clients, and one for each of the largest clients: the image becomes wider."""
    widths = []
    for panels in (0, 2):
        out = tmp_path / f"{panels}.png"
        done = CliRunner().invoke(
            app, ["data", "describe", "--data", "ml-digits", "--out", str(out), "--co-occurrence-of", str(panels)]
        )
        assert done.exit_code == 0, done.output
        with Image.open(tmp_path / f"{panels}-co-occurrence.png") as image:
            widths.append(image.width)
    assert 2.4 * widths[0] < widths[1] < 3.2 * widths[0]
