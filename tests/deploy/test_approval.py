"""The description of a study that a person approves, and the limits of a site."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

import what_leaves
from consortium import CLASSES

from fedmll.config.experiment import Experiment
from fedmll.core.text import confirm_always
from fedmll.deploy.error_codes import SiteError
from fedmll.deploy.experiment_for_sites import compute_study_digest
from fedmll.deploy.site import approval
from fedmll.deploy.site.site_config import SiteLimits
from fedmll.methods.framework.task import Task


def task_of(**changes: object) -> Task:
    values = {"data": {"name": "none"}, "model": {"channels": [4, 12]}, "training": {"rounds": 3, "batch_size": 16}}
    experiment = Experiment.make(values).changed({name.replace("__", "."): value for name, value in changes.items()})
    return Task(experiment, tuple(CLASSES), (1, 8, 8), 3, torch.device("cpu"))


def shown(task: Task, training: int = 40, held_out: int = 10, memory: float = 1e6) -> dict[str, str]:
    return dict(approval.describe_study(task, training, held_out, memory))


def test_limit_of_images_is_inclusive() -> None:
    limits = SiteLimits(min_images=50)
    limits.check_image_count(50)
    with pytest.raises(SiteError, match=r"49 images would be left .* at least 50 \(--min-images\)"):
        limits.check_image_count(49)
    SiteLimits().check_image_count(10)
    with pytest.raises(SiteError, match="at least 10"):
        SiteLimits().check_image_count(9)


def test_limits_may_be_1() -> None:
    limits = SiteLimits(max_rounds=1, min_images=1, max_memory=1e-9)
    limits.check_image_count(1)
    limits.check_settings(task_of(training__rounds=1).experiment)
    with pytest.raises(SiteError, match="The study has 2 rounds, and you allow 1"):
        limits.check_settings(task_of(training__rounds=2).experiment)
    with pytest.raises(SiteError, match="0 images"):
        limits.check_image_count(0)


def test_limit_of_rounds_is_inclusive_and_methods_are_checked() -> None:
    SiteLimits(max_rounds=3, methods=("fedprox", "fedavg")).check_settings(task_of().experiment)
    with pytest.raises(SiteError, match=r"you allow fedprox \(--methods\)"):
        SiteLimits(methods=("fedprox",)).check_settings(task_of().experiment)


@pytest.mark.parametrize("name", what_leaves.methods())
def test_listed_parts_are_those_whose_tensors_were_recorded(name: str) -> None:
    """As the table in docs/reference/what-leaves-a-site.md has them: `part/name`."""
    rows = [row for row in what_leaves.documented(what_leaves.DOCUMENT.read_text()) if row[0] == name]
    assert rows
    recorded = {cell.split("/")[0].strip("`") for row in rows for cell in row[2].split() if "/" in cell}
    text = shown(task_of(method__name=name, **what_leaves.OPTIONS.get(name, {})))["leaves per round"]
    usual, _, parts = text.partition("; for the parts: ")
    assert usual == "the trained weights, loss, number of images and steps"
    assert set(parts.split(", ") if parts else []) == recorded


@pytest.mark.parametrize(
    ("memory", "figure"),
    [(0.21e6, "0.00021 GB"), (2.5e9, "2.5 GB"), (1.26e9, "1.3 GB"), (1e9, "1 GB")],
)
def test_memory_is_shown_in_gigabytes(memory: float, figure: str) -> None:
    assert shown(task_of(), memory=memory)["model"] == f"convnet; with a batch about {figure} of memory"


def test_large_holdouts_and_small_batches_are_marked_as_unusual() -> None:
    assert shown(task_of(), 25, 25)["your images"] == "25 to train on, 25 held out for tests"
    assert shown(task_of(), 24, 26)["your images"] == "24 to train on, 26 held out for tests (unusually many)"
    assert shown(task_of(training__batch_size=8))["batch"] == "8"
    assert shown(task_of(training__batch_size=7))["batch"] == "7 (unusually small)"


def test_what_leaves_per_test_depends_on_held_out_images() -> None:
    assert shown(task_of(), 50, 0)["leaves per test"] == "nothing"
    text = shown(task_of(), 49, 1)["leaves per test"]
    assert text.startswith("metrics of the federated model on your held-out images")
    assert "how many images have which score" in text


def test_other_rows_of_the_description() -> None:
    found = shown(task_of(training__local_epochs=2))
    assert found["method"] == "fedavg"
    assert found["rounds"] == "3, each with 2 passes over your images"
    assert found["image size"] == "1 × 8 × 8"
    assert found["clients"] == "3"
    assert "digest" in found["leaves once"]


def test_digest_does_not_depend_on_the_order_of_keys() -> None:
    first = {"clients": 3, "experiment": {"seed": 1, "method": {"name": "fedavg"}}, "classes": ["a", "b"]}
    same = {"classes": ["a", "b"], "experiment": {"method": {"name": "fedavg"}, "seed": 1}, "clients": 3}
    assert list(first) != list(same)
    assert compute_study_digest(first) == compute_study_digest(same)
    others = [first | {"clients": 4}, first | {"classes": ["b", "a"]}, first | {"experiment": {"seed": 1}}]
    assert len({compute_study_digest(study) for study in (first, *others)}) == 4
    assert len(compute_study_digest(first)) == 64


def test_confirm_always_needs_no_terminal() -> None:
    assert confirm_always("Take part?") is True
