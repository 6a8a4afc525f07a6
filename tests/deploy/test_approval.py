"""What a person is shown before a site takes part, and the limits that hold whatever is asked."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

import leaving
from sites import CLASSES

from fedmll.deploy import approval
from fedmll.deploy.approval import Limits
from fedmll.deploy.sentences import Refused
from fedmll.experiment import Experiment
from fedmll.task import Task


def task_of(**changes: object) -> Task:
    values = {"data": {"name": "none"}, "model": {"channels": [4, 12]}, "training": {"rounds": 3, "batch_size": 16}}
    experiment = Experiment.make(values).changed({name.replace("__", "."): value for name, value in changes.items()})
    return Task(experiment, tuple(CLASSES), (1, 8, 8), 3, torch.device("cpu"))


def shown(task: Task, training: int = 40, held_out: int = 10, memory: float = 1e6) -> dict[str, str]:
    return dict(approval.described(task, training, held_out, memory))


def test_exactly_as_many_images_as_wanted_are_enough() -> None:
    limits = Limits(min_images=50)
    limits.check_images(50)
    with pytest.raises(Refused, match=r"49 images would be left .* at least 50 \(--min-images\)"):
        limits.check_images(49)
    Limits().check_images(10)
    with pytest.raises(Refused, match="at least 10"):
        Limits().check_images(9)


def test_limits_may_be_1() -> None:
    limits = Limits(max_rounds=1, min_images=1, max_memory=1e-9)
    limits.check_images(1)
    limits.check_settings(task_of(training__rounds=1).experiment)
    with pytest.raises(Refused, match="There are 2 rounds, and you allow 1"):
        limits.check_settings(task_of(training__rounds=2).experiment)
    with pytest.raises(Refused, match="0 images"):
        limits.check_images(0)


def test_exactly_as_many_rounds_as_allowed_and_an_allowed_method() -> None:
    Limits(max_rounds=3, methods=("fedprox", "fedavg")).check_settings(task_of().experiment)
    with pytest.raises(Refused, match=r"you allow fedprox \(--methods\)"):
        Limits(methods=("fedprox",)).check_settings(task_of().experiment)


@pytest.mark.parametrize("name", leaving.methods())
def test_the_parts_that_are_listed_are_those_whose_tensors_were_recorded(name: str) -> None:
    """As the table in docs/deployment.md has them: `part/name`."""
    rows = [row for row in leaving.documented(leaving.DOCUMENT.read_text()) if row[0] == name]
    assert rows
    recorded = {cell.split("/")[0].strip("`") for row in rows for cell in row[2].split() if "/" in cell}
    text = shown(task_of(method__name=name, **leaving.OPTIONS.get(name, {})))["leaves a round"]
    usual, _, parts = text.partition("; of the parts: ")
    assert usual == "the trained weights, loss, number of images and steps"
    assert set(parts.split(", ") if parts else []) == recorded


@pytest.mark.parametrize(
    ("memory", "figure"),
    [(0.21e6, "0.00021 GB"), (2.5e9, "2.5 GB"), (1.26e9, "1.3 GB"), (1e9, "1 GB")],
)
def test_the_memory_is_shown_in_gigabytes(memory: float, figure: str) -> None:
    assert shown(task_of(), memory=memory)["model"] == f"convnet; with a batch about {figure} of memory"


def test_what_is_unusual_is_said_beyond_half_of_the_images_and_below_8_a_batch() -> None:
    assert shown(task_of(), 25, 25)["your images"] == "25 to train on, 25 held out for tests"
    assert shown(task_of(), 24, 26)["your images"] == "24 to train on, 26 held out for tests (unusually many)"
    assert shown(task_of(training__batch_size=8))["batch"] == "8"
    assert shown(task_of(training__batch_size=7))["batch"] == "7 (unusually small)"


def test_what_leaves_a_test_is_said_and_nothing_where_nothing_is_held_out() -> None:
    assert shown(task_of(), 50, 0)["leaves a test"] == "nothing"
    text = shown(task_of(), 49, 1)["leaves a test"]
    assert text.startswith("metrics of the common model on your held-out images")
    assert "how many of them have which score" in text


def test_the_rest_of_what_is_shown() -> None:
    found = shown(task_of(training__local_epochs=2))
    assert found["method"] == "fedavg"
    assert found["rounds"] == "3, each 2 × over your images"
    assert found["image size"] == "1 × 8 × 8"
    assert found["clients"] == "3"
    assert "digest" in found["leaves once"]


def test_a_digest_is_of_what_is_asked_not_of_its_order() -> None:
    first = {"clients": 3, "experiment": {"seed": 1, "method": {"name": "fedavg"}}, "classes": ["a", "b"]}
    same = {"classes": ["a", "b"], "experiment": {"method": {"name": "fedavg"}, "seed": 1}, "clients": 3}
    assert list(first) != list(same)
    assert approval.digest_of(first) == approval.digest_of(same)
    others = [first | {"clients": 4}, first | {"classes": ["b", "a"]}, first | {"experiment": {"seed": 1}}]
    assert len({approval.digest_of(asked) for asked in (first, *others)}) == 4
    assert len(approval.digest_of(first)) == 64


def test_beforehand_is_a_yes() -> None:
    assert approval.beforehand() is True
