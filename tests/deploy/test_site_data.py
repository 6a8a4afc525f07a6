"""A site's data: classes that it does not annotate are unknown, and unreadable images are named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

from consortium import Consortium
from fake_grid import consortium, make_site  # noqa: F401  (a fixture)

from fedmll.config.settings import ReadingOptions
from fedmll.core.errors import DataError
from fedmll.deploy.site import site_data
from fedmll.deploy.site.site_config import Site


def test_classes_without_annotation_are_unknown(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    here = make_site(consortium, "site-c", tmp_path)
    summary = site_data.check_site_data(here)
    assert summary.images == 50
    assert len(summary.classes) == 7  # three columns are not there
    classes = [f"digit-{n}" for n in range(10)]
    data = site_data.load_site_data(here, classes, (1, 8, 8), seed=3, holdout=0.2)
    assert (len(data.train), len(data.held_out)) == (40, 10)
    assert np.flatnonzero(~data.annotated).tolist() == [2, 5, 7]
    assert (data.train.labels[:, [2, 5, 7]] == -1).all()
    private = site_data.load_site_data(here, None, (1, 8, 8), seed=3, holdout=0.0)
    assert private.train.classes == tuple(c for n, c in enumerate(classes) if n not in (2, 5, 7))
    assert site_data.load_site_data(here, classes, (3, 8, 8), 3, 0.0).train.samples(slice(0, 2)).shape == (2, 3, 8, 8)
    with pytest.raises(DataError, match="'digit-0', which this federation does not have"):
        site_data.load_site_data(here, classes[1:], (1, 8, 8), 3, 0.0)
    assert site_data.load_site_data(here, classes, (1, 9, 7), 3, 0.0).train.sample_shape == (1, 9, 7)


def test_list_form_labels_every_class_unless_classes_are_chosen(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "labels.csv").write_text("image,labels\n00000.png,cat\n00001.png,cat|dog\n00002.png,none\n00003.png,\n")
    here = Site(name="s", csv=tmp_path / "labels.csv", images=consortium.folder / "images", state_dir=tmp_path)
    assert site_data.load_site_data(here, ["cow", "cat", "dog"], (1, 8, 8), 0, 0.0).train.labels.tolist() == [
        [0, 1, 0],
        [0, 1, 1],
        [0, 0, 0],
        [-1, -1, -1],
    ]
    only = replace(here, reading=ReadingOptions(classes=("cat", "dog")))  # it does not look for cows
    assert site_data.load_site_data(only, ["cow", "cat", "dog"], (1, 8, 8), 0, 0.0).annotated.tolist() == [
        False,
        True,
        True,
    ]


def test_unreadable_images_are_named_before_anything_starts(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    (tmp_path / "labels.csv").write_text("image,a\nbad.png,1\n")
    with pytest.raises(DataError, match=r"1 of 1 images cannot be read: .*bad\.png"):
        site_data.check_site_data(
            Site(name="s", csv=tmp_path / "labels.csv", images=tmp_path, state_dir=tmp_path / "memory")
        )
