"""What a real site says of few images: nothing that a single one can be read from, and before it takes part."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from consortium import write_csv
from PIL import Image
from sklearn.datasets import load_digits

from fedmll.config.experiment import Experiment
from fedmll.core.message import Message
from fedmll.core.small_groups import describe_membership_risk, find_small_classes
from fedmll.deploy.error_codes import SiteError
from fedmll.deploy.experiment_for_sites import StudySetup, resolve_for_sites, settings_for_sites
from fedmll.deploy.site.site_config import Site, SiteLimits
from fedmll.deploy.site.validate import ModelValidation
from fedmll.deploy.site.worker import SiteWorker
from fedmll.evaluation import metrics
from fedmll.evaluation.histograms import evaluate_histograms

TRAINED, TESTED = 30, 24
CLASSES = ("rare", "common")
PIXELS = load_digits().images


def site_with(folder: Path, rare: int, min_count: int = 10, trained: int = TRAINED, **limits: Any) -> Site:
    """One held-out image, `rare`, has the rare class; half of them have the common one."""
    images = folder / "images"
    images.mkdir(parents=True)
    rows = [["image", *CLASSES, "split"]]
    for place in range(TRAINED + TESTED):
        name, test = f"{place}.png", place >= TRAINED
        if not test and place >= trained:
            continue
        Image.fromarray((PIXELS[place] * 15.9).astype("uint8")).save(images / name)
        has = place - TRAINED == rare if test else place % 3 == 0
        rows.append([name, str(int(has)), str(place % 2), "test" if test else "train"])
    write_csv(folder / "labels.csv", rows)
    return Site(
        name="s", csv=folder / "labels.csv", images=images, state_dir=folder / "memory", device="cpu",
        limits=replace(SiteLimits(min_count=min_count), **limits), needs_approval=False,
    )  # fmt: skip


def worker_of(site: Site, said: list[str] | None = None, **changes: Any) -> SiteWorker:
    values = {"data": {"name": "none"}, "model": {"channels": [4, 12]}, "training": {"rounds": 2, "batch_size": 8}}
    experiment = Experiment.make(values).changed({name.replace("__", "."): value for name, value in changes.items()})
    setup = StudySetup(
        run="run1",
        experiment=settings_for_sites(resolve_for_sites(experiment, (1, 8, 8))),
        classes=CLASSES,
        shape=(1, 8, 8),
        clients=2,
    )
    return SiteWorker(site, setup, (said if said is not None else list[str]()).append)


def evaluated(site: Site) -> tuple[Message, np.ndarray]:
    """What leaves, and the scores that do not."""
    worker = worker_of(site)
    trainer = worker.trainer
    sent = trainer.method.final_model(trainer.method.initial_state())
    reply = worker.evaluate(sent)
    data = worker.data.held_out
    return reply, trainer.predict(data, 0, len(data)).numpy()


@pytest.mark.parametrize("rare", [3, 17])
def test_metrics_do_not_reveal_the_rank_of_a_single_held_out_positive(tmp_path: Path, rare: int) -> None:
    reply, scores = evaluated(site_with(tmp_path / "all", rare, min_count=1))
    rank = int((scores[:, 0] < scores[rare, 0]).sum())
    common = evaluate_histograms(reply["counts"].numpy().astype(np.int64), CLASSES).per_class["auc"][1]
    found = (2 * reply.numbers["macro_auc"] - common) / 100 * (TESTED - 1)
    assert found == pytest.approx(rank, abs=0.6)  # the attack works

    reply, scores = evaluated(site_with(tmp_path / "few", rare, min_count=10))
    assert not reply["counts"][:, 0].any()
    truth = np.stack([np.full(TESTED, -1), np.arange(TRAINED, TRAINED + TESTED) % 2], axis=1).astype(np.int8)
    without = metrics.evaluate(scores, truth, CLASSES).values
    assert reply.numbers.keys() == without.keys()
    for name, value in reply.numbers.items():
        assert value == pytest.approx(without[name], nan_ok=True), name
    other, _ = evaluated(site_with(tmp_path / "other", rare + 1, min_count=10))
    assert str(other.numbers) == str(reply.numbers)  # whoever it is


def test_small_classes_have_few_positives_or_negatives_but_not_none() -> None:
    targets = np.full((60, 6), -1, np.int8)
    for column, (present, absent) in enumerate([(0, 0), (9, 50), (10, 10), (0, 9), (0, 10), (10, 0)]):
        targets[:present, column], targets[present : present + absent, column] = 1, 0
    assert find_small_classes(targets, 10).tolist() == [False, True, False, True, False, False]


def test_file_to_send_has_no_metric_of_small_classes(tmp_path: Path) -> None:
    counts = np.zeros((2, 2, 2048), dtype=np.int64)
    counts[0, 1, 1500], counts[1, 1, 500] = 12, 12
    report = metrics.ClassificationReport({"macro_auc": 12.5}, {}, {})
    (tmp_path / "model").write_text("a model")
    ModelValidation(
        model=tmp_path / "model",
        classes=CLASSES,
        images=24,
        report=report,
        counts=counts,
        withheld_classes=("rare",),
        min_count=10,
    ).write(tmp_path / "told.json")
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["metrics"]["macro_auc"] == 100
    assert told["per_class"].keys() == told["counts"].keys() == {"common"}


def test_site_with_fewer_images_than_the_minimum_does_not_train(tmp_path: Path) -> None:
    with pytest.raises(SiteError, match=r"4 images would be left .* fewer than 5 images do not leave"):
        worker_of(site_with(tmp_path, 3, trained=4, min_images=1))


FROZEN: dict[str, Any] = {"method__name": "fed-ridge", "model__freeze": "backbone", "model__weights": "random"}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (FROZEN | {"model__channels": (4, 30)}, True),
        (FROZEN | {"model__channels": (4, 29)}, False),
        ({"model__channels": (4, 30)}, False),  # fedavg
        ({"method__name": "spherefed", "model__channels": (4, 30)}, True),
    ],
)
def test_membership_risk_is_shown_before_approval(tmp_path: Path, changes: dict[str, Any], told: bool) -> None:
    said: list[str] = []
    worker_of(site_with(tmp_path, 3), said, **changes)
    lines = [line for line in said if line.strip().startswith("membership")]
    assert len(lines) == told
    if told:
        assert "sums of features of 30 images, 30 numbers each" in lines[0]
        assert lines[0].endswith("is one of yours")


def test_gram_matrix_of_few_images_reveals_membership() -> None:
    """What the sentence says, and that it stops there."""
    rng = np.random.default_rng(0)

    def outside(samples: int, width: int, member: bool) -> float:
        """How far a sample is outside of what the matrix spans."""
        features = np.concatenate([rng.normal(size=(samples, width)), np.ones((samples, 1))], axis=1)
        values, vectors = np.linalg.eigh(features.T @ features)
        tried = features[0] if member else np.append(rng.normal(size=width), 1)
        return float(np.linalg.norm(vectors[:, values < 1e-9].T @ tried))

    assert outside(12, 12, member=True) < 1e-6 < 1e-3 < outside(12, 12, member=False)
    assert outside(13, 12, member=False) < 1e-6
    assert describe_membership_risk(12, 12) is not None
    assert describe_membership_risk(13, 12) is None
