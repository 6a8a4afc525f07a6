"""The registry of names; listing names does not import torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fedmll
from fedmll.config.experiment import Experiment
from fedmll.core import registry
from fedmll.core.errors import ConfigError
from fedmll.data.sources.base import Source
from fedmll.evaluation import metrics
from fedmll.evaluation.metric_definitions import METRICS

SOURCE = Path(__file__).parents[2] / "src"


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("method", {"fedavg", "fedprox", "fedmlp"}),
        ("loss", {"bce", "weighted", "asl"}),
        ("backbone", {"convnet", "resnet18", "mlp", "vit"}),
        ("source", {"digits", "cifar10", "fashion-mnist", "packed", "folder", "features"}),
        ("partition", {"iid", "dirichlet", "natural", "labels-per-client"}),
        ("annotation", {"none", "missing", "one-class"}),
        ("augmentation", {"none", "flip", "shift", "crop-flip", "weak", "jitter", "strong"}),
        ("metric", {"macro_auc", "map", "accuracy"}),
    ],
)
def test_built_in_names_are_registered(kind: str, names: set[str]) -> None:
    assert names <= registry.all_of(kind).keys()
    assert not names & registry.find_added(kind).keys()
    assert registry.find(kind, min(names)) is registry.all_of(kind)[min(names)]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": {"backbone": "resnet19"}}, r"There is no backbone 'resnet19'; did you mean 'resnet18'\?$"),
        (
            {"model": {"backbone": "qqq"}},
            "model.backbone: .* 'qqq'; known: convnet, densenet121, mlp, mobilenet-v2, resnet18, resnet50, .*vit",
        ),
        ({"partition": {"kind": "dirichlett"}}, "partition.kind: .*did you mean 'dirichlet'"),
        ({"annotation": {"kind": "one-clas"}}, "annotation.kind: .*did you mean 'one-class'"),
        ({"training": {"loss": "auto"}}, "training.loss: There is no loss 'auto'"),
        ({"training": {"augment": "flop"}}, "training.augment: .*did you mean 'flip'"),
    ],
)
def test_error_for_an_unknown_name_suggests_known_names(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Experiment.make(values)


def test_built_in_names_cannot_be_registered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"'digits' in test_registry has the name of a built-in source"):
        registry.register("source", "digits")(
            Source(description="mine", load=lambda request: None, available=lambda root: True)
        )  # type: ignore[arg-type, return-value]
    monkeypatch.setitem(registry._registered, "loss", {})
    monkeypatch.setattr(registry, "_modules", {})
    registry.register("loss", "bce")(lambda *_: None)
    with pytest.raises(ConfigError, match="'bce' in test_registry"):
        registry.register("loss", "bce")(_as_if_built_in)


def _as_if_built_in() -> None: ...


_as_if_built_in.__module__ = "fedmll.methods.losses"


def test_registered_metrics_equal_those_of_evaluate(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, targets = np.random.default_rng(0).random((40, 3)), np.random.default_rng(1).integers(0, 2, (40, 3))
    report = metrics.evaluate(scores, targets, ("a", "b", "c"))
    assert {name for name in METRICS if "_" not in name or name in report.values} <= registry.all_of("metric").keys()
    for name, value in report.values.items():
        assert registry.find("metric", name)(scores, targets) == value
    monkeypatch.setitem(registry._registered, "metric", dict(registry._registered["metric"]))
    registry.register("metric", "test-mean")(lambda scores, targets: (float(scores.mean()), scores.mean(0)))
    report = metrics.evaluate(scores, targets, ("a", "b", "c"))
    assert report.values["test-mean"] == scores.mean()
    assert (report.per_class["test-mean"] == scores.mean(0)).all()


def test_package_lists_its_public_names() -> None:
    offered = {"run", "resume", "compare", "load_model", "load_run", "Experiment", "Method", "Part", "register"}
    assert set(dir(fedmll)) == offered | {"FedmllError", "Callback", "Result", "make_experiment", "__version__"}
    for name in sorted(set(dir(fedmll)) - {"load_run", "Method", "Part"}):  # these: when they are written
        assert getattr(fedmll, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'rnu'"):
        fedmll.rnu  # noqa: B018


COMMAND = """
import sys
sys.argv = ["fedmll", *{words}]
from fedmll.cli.main import main
try:
    main()
except SystemExit as leave:
    assert not leave.code
print("torch" in sys.modules, "sklearn" in sys.modules)
"""


@pytest.mark.parametrize("words", [["methods"], ["data", "list"], ["weights", "list"], ["--version"], ["run", "-h"]])
def test_lists_and_help_import_neither_torch_nor_sklearn(words: list[str]) -> None:
    finished = subprocess.run(
        [sys.executable, "-c", COMMAND.format(words=words)],
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert finished.stdout.splitlines()[-1].split() == ["False", "False"]


def test_every_method_has_a_published_setting_and_a_measured_cost() -> None:
    from fedmll.methods.catalog import built_in_methods, read_costs

    known, costs = built_in_methods(), read_costs()
    for name, method in known.items():
        assert method.setting, name
        assert set(method.setting) <= {"skew", "partial annotation", "private labels"}, name
    lacking = known.keys() - costs.keys() - {"compose"}
    assert not lacking, f"no measured cost of {sorted(lacking)}; run python benchmarks/method_costs.py"
    assert costs.keys() <= known.keys()
    assert costs["fedavg"] == 1.0
